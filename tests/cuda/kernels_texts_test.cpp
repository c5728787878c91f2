// Every kernel text compiles for every architecture that packs are made for, without a word from
// the compiler, and its cubins say that no kernel has memory of its own (spilled registers,
// arrays). Needs NVRTC and no GPU; the virtual one's "cubins" are not looked into.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "core/backend/cuda/kernels/families.h"
#include "tests/cuda/kernels_device.h"

namespace tessera::cuda::test {
namespace {

// The vendor's sine, cosine and tangent of doubles reduce large arguments through an array on the
// stack, and so do functions that reflect by them; nothing else may have memory of its own.
constexpr unsigned kReductionBytes = 40;
constexpr std::string_view kReducesAngles[] = {"sin_f64",   "cos_f64",    "tan_f64",  "digamma_",
                                               "trigamma_", "lgamma_f64", "randn_f64"};

struct Use {
  std::string kernel;
  unsigned registers = 0, frame_bytes = 0;
};

template <class T>
T at(const std::string& bytes, size_t offset) {
  T value{};
  if (offset + sizeof(T) > bytes.size()) throw std::runtime_error("a cubin ends early");
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

// What an ELF file of machine 190 (CUDA) says of its kernels in the section .nv.info: records of
// format, attribute and size; of 0x04 with attribute 0x2f (registers) and 0x11 (frame), both a
// symbol's number and a value. Sections of registers' counts name kernels in the symbol table.
std::vector<Use> uses_of(const std::string& cubin) {
  std::vector<Use> uses;
  if (cubin.compare(0, 4, "\177ELF") != 0 || at<uint16_t>(cubin, 18) != 190) return uses;
  const auto sections = at<uint64_t>(cubin, 40);
  const auto entry = at<uint16_t>(cubin, 58), count = at<uint16_t>(cubin, 60),
             names = at<uint16_t>(cubin, 62);
  auto header = [&](size_t i) { return sections + i * entry; };
  const auto text_of = [&](size_t table, size_t offset) {
    return std::string(cubin.c_str() + at<uint64_t>(cubin, header(table) + 24) + offset);
  };
  size_t symbols = 0, info = 0;
  for (size_t i = 0; i < count; ++i) {
    const std::string name = text_of(names, at<uint32_t>(cubin, header(i)));
    if (name == ".symtab") symbols = i;
    if (name == ".nv.info") info = i;
  }
  if (!symbols || !info) throw std::runtime_error("a cubin without .nv.info");
  const auto strings = at<uint32_t>(cubin, header(symbols) + 40);
  const auto symbol = [&](uint32_t n) {
    const size_t where = at<uint64_t>(cubin, header(symbols) + 24) + n * 24;
    return text_of(strings, at<uint32_t>(cubin, where));
  };
  std::map<std::string, Use> found;
  const size_t begin = at<uint64_t>(cubin, header(info) + 24),
               end = begin + at<uint64_t>(cubin, header(info) + 32);
  for (size_t i = begin; i + 4 <= end;) {
    const auto format = at<uint8_t>(cubin, i), attribute = at<uint8_t>(cubin, i + 1);
    const size_t size = format == 4 ? at<uint16_t>(cubin, i + 2) : 0;
    if (format == 4 && size == 8 && (attribute == 0x2f || attribute == 0x11)) {
      Use& use = found[symbol(at<uint32_t>(cubin, i + 4))];
      (attribute == 0x2f ? use.registers : use.frame_bytes) = at<uint32_t>(cubin, i + 8);
    }
    i += 4 + size;
  }
  for (auto& [name, use] : found) {
    use.kernel = name;
    uses.push_back(use);
  }
  return uses;
}

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

INSTANTIATE_TEST_SUITE_P(Architectures, Texts, testing::Values("sm_80", "sm_90", "sm_100"));

}  // namespace
}  // namespace tessera::cuda::test
