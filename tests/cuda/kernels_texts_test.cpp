// Every kernel text compiles for every architecture that packs are made for, without a word from
// the compiler, and its cubins say that no kernel uses local memory (spilled registers, arrays).
// Needs NVRTC and no GPU; the virtual one's "cubins" are not looked into.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "core/backend/cuda/kernels/families.h"
#include "tests/cuda/cubin_use.h"
#include "tests/cuda/kernels_device.h"

namespace tessera::cuda::test {
namespace {

// The vendor's sine, cosine and tangent of doubles reduce large arguments through an array on the
// stack, and so do functions that reflect by them; nothing else may have memory of its own.
constexpr unsigned kReductionBytes = 40;
constexpr std::string_view kReducesAngles[] = {"sin_f64",   "cos_f64",    "tan_f64",  "digamma_",
                                               "trigamma_", "lgamma_f64", "randn_f64"};

class Texts : public testing::TestWithParam<const char*> {};

TEST_P(Texts, CompileWithoutWarningsOrLocalMemory) {
  // While a kernel is written: the name of its family, and a part of its instance's.
  const char* only = std::getenv("TESSERA_KERNEL_FAMILY");
  const char* part = std::getenv("TESSERA_KERNEL_INSTANCE");
  std::map<std::string, std::pair<unsigned, std::string>> most;  // registers, by family
  size_t kernels = 0, bytes = 0;
  for (KernelText& text : all_kernel_texts()) {
    if (only && text.family != only) continue;
    if (part)
      std::erase_if(text.instances,
                    [&](const Instance& i) { return i.name.find(part) == i.name.npos; });
    if (text.instances.empty()) continue;
    Compiled c;
    try {
      c = compile(compose(text), GetParam());
    } catch (const std::runtime_error& e) {
      GTEST_SKIP() << e.what();
    }
    ASSERT_TRUE(c.good) << text.family << ' ' << text.instances[0].name << "\n" << c.log;
    EXPECT_EQ(c.log, "") << text.family << ' ' << text.instances[0].name;
    bytes += c.cubin.size();
    for (const Use& use : uses_of(c.cubin)) {
      if (use.kernel.starts_with("$")) continue;  // a function of the compiler's own
      ++kernels;
      const bool excepted =
          std::any_of(std::begin(kReducesAngles), std::end(kReducesAngles),
                      [&](std::string_view name) { return use.kernel.starts_with(name); });
      EXPECT_LE(use.frame_bytes, excepted ? kReductionBytes : 0) << use.kernel;
      EXPECT_GT(use.registers, 0u) << use.kernel;
      auto& m = most[std::string(text.family)];
      if (use.registers > m.first) m = {use.registers, use.kernel};
      if (std::getenv("TESSERA_KERNEL_REGISTERS"))
        std::printf("%4u registers %s\n", use.registers, use.kernel.c_str());
    }
  }
  for (const auto& [family, use] : most)
    std::printf("%s: at most %u registers, %s\n", family.c_str(), use.first, use.second.c_str());
  std::printf("%s: %zu kernels, %.1f MB\n", GetParam(), kernels, double(bytes) / 1e6);
}

INSTANTIATE_TEST_SUITE_P(Architectures, Texts, testing::Values("sm_80", "sm_90", "sm_100"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace tessera::cuda::test
