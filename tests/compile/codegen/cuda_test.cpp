// The CUDA printer: what it prints and, where there is a card, that it computes what the
// interpreter does. cubins_test.cpp compiles what it prints.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>

#include "compile/codegen/device_kernels.h"
#include "compile/codegen/generate.h"
#include "compile/codegen/samples.h"
#include "core/tensor/device_runtime.h"
#include "tests/compile/codegen/compare.h"
#include "tests/support/on_card.h"

namespace tessera::test {
namespace {

using namespace compiler;

TEST(PrintCuda, RowsStayInRegistersFromNestToNest) {
  std::string text = print_cuda(softmax_body(100, 1024), "softmax");
  EXPECT_NE(text.find("Pack<float, 4> h0[8];"), text.npos) << text;  // a warp has 8 packs a lane
  EXPECT_NE(text.find("v1 = float(warp_join<Max>(a1));"), text.npos) << text;
  EXPECT_NE(text.find("v4 = float(warp_join<Sum>(a4));"), text.npos) << text;
  text = print_cuda(softmax_body(100, 8192), "softmax");
  EXPECT_NE(text.find("block_join<Max, 256>(a1)"), text.npos) << text;
  EXPECT_NE(text.find("h0["), text.npos) << text;
  text = print_cuda(softmax_body(100, 50000), "softmax");
  EXPECT_EQ(text.find("h0["), text.npos) << "too long for registers\n" << text;
}

TEST(PrintCuda, ElementsAreReadAndWrittenInPacks) {
  std::string text = print_cuda(bias_gelu_body(10, 32), "gelu");
  EXPECT_NE(text.find("const auto p0 = load<4>(x0 + "), text.npos) << text;
  EXPECT_NE(text.find("store(y0 + "), text.npos) << text;
  EXPECT_EQ(text.find("join"), text.npos);
  text = print_cuda(bias_gelu_body(10, 33), "gelu");
  EXPECT_EQ(text.find("load<"), text.npos) << "rows of 33 are not aligned\n" << text;
}

TEST(PrintCuda, SumsOverRowsAreJoinedByASecondKernel) {
  const std::string text = print_cuda(layer_norm_grad_body(1000, 768), "norm");
  EXPECT_NE(text.find("norm_finish("), text.npos) << text;
  EXPECT_NE(text.find("__shared__ double"), text.npos) << text;
}

// Generated code on a card.
TEST_F(OnCard, BodiesByHand) {
  std::vector<Body> bodies;
  for (DType t : {kF32, kF64, kBF16, kF16})
    for (int64_t n : {7, 64, 1000, 3000, 40000})
      bodies.push_back(softmax_body(n < 10000 ? 9 : 2, n, t));
  for (auto [rows, n] : {std::pair(5, 33), std::pair(64, 128), std::pair(300, 768)}) {
    bodies.push_back(layer_norm_body(rows, n));
    bodies.push_back(layer_norm_grad_body(rows, n));
    bodies.push_back(bias_gelu_body(rows, n, kBF16));
    bodies.push_back(cross_entropy_body(rows, n));
  }
  bodies.push_back(cross_entropy_body(20, 9000)),
      bodies.push_back(cross_entropy_body(3, 9000, false));
  bodies.push_back(adamw_body(1000)), bodies.push_back(adamw_body(1001));
  BodyBuilder total({100000});
  InstrId x = total.load(1);
  total.store(total.sum(total.op("square", {x}), 1)), total.store(total.op("neg", {x}));
  bodies.push_back(total.body);
  BodyBuilder columns({700, 5000});  // several tiles of columns
  x = columns.load(3);
  columns.store(columns.sum(x, 1)), columns.store(columns.sum(columns.op("abs", {x}), 3));
  columns.store(columns.reduce(ReduceKind::kMax, x, 1));
  bodies.push_back(columns.body);
  BodyBuilder r({64, 700});
  InstrId f = r.load(3), positive = r.op("gt", {f, r.constant(0.0)}, true);
  r.store(r.sum(positive, 2)), r.store(r.reduce(ReduceKind::kAny, positive, 2));
  r.store(r.reduce(ReduceKind::kMin, r.cast(positive, kI32), 2));
  r.store(r.reduce(ReduceKind::kAll, positive, 2)), r.store(r.sum(r.index(1), 3));
  bodies.push_back(r.body);
  EXPECT_EQ(compare_on_device(card_, bodies, 1e-5), int(bodies.size()));
}

// Bytes of the card's memory that a kernel of the virtual GPU read and wrote, in checked runs.
using Counters = std::array<unsigned long long, 3>;
std::optional<Counters> counters_of(const std::string& kernel) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  auto* ask = driver ? reinterpret_cast<int (*)(const char*, unsigned long long*)>(
                           dlsym(driver, "vgpu_counters"))
                     : nullptr;
  Counters counters{};
  if (!ask || ask(kernel.c_str(), counters.data()) != 0) return {};
  return counters;
}

TEST_F(OnCard, OperandsAreReadOnceAndResultsWrittenOnce) {
  if (!std::getenv("VGPU_CHECK"))
    GTEST_SKIP() << "only checked runs of the virtual GPU count bytes";
  struct Case {
    const char* name;
    Body body;
    uint64_t read, written, finish_read = 0, finish_written = 0;
  };
  constexpr uint64_t kLanes = 32;
  const uint64_t whole = 64 * 128 * 4, row = 128 * 4, column = 64 * 4, groups = 64 / 8;
  const std::vector<Case> cases = {
      {"bias_gelu", bias_gelu_body(64, 128), 2 * whole, whole},
      {"adamw", adamw_body(64 * 128), 4 * whole + 64 * 128 / 4 * 3 * 4, 3 * whole},
      {"softmax", softmax_body(64, 128), whole, whole},
      {"long_softmax", softmax_body(2, 8192), 2 * 8192 * 4, 2 * 8192 * 4},
      {"norm", layer_norm_body(64, 128), whole + 64 * 2 * row, whole + 2 * column},
      // A row's mean and rstd are read by all lanes; each group of rows leaves two rows of sums.
      {"norm_grad", layer_norm_grad_body(64, 128), 2 * whole + 64 * row + 2 * kLanes * column,
       whole + groups * 2 * row, groups * 2 * row, 2 * row},
  };
  for (const Case& c : cases) {
    Metas results = results_of(c.body);
    for (Meta& m : results) m.device = card_;
    const auto fused = make_ref<const Fused>(c.name, c.body, results);
    const auto kernel = generate_on(card_, std::vector<DeviceSource>{{fused.get(), 0}})[0];
    Tensors in, out;
    for (size_t k = 0; k < c.body.operands.size(); ++k)
      in.push_back(operand_of(c.body, k, 1).to(card_));
    for (size_t k = 0; k < c.body.stores.size(); ++k) out.push_back(result_of(c.body, k).to(card_));
    const Tensor scratch = empty({int64_t(kernel->scratch_bytes) + 1}, kU8, card_);
    kernel->launch(in, out, scratch.device_data(), stream_of(card_));
    runtime_of(card_).synchronize(stream_of(card_));
    const std::string symbol = std::string("k0_") + c.name;
    const std::optional<Counters> got = counters_of(symbol), end = counters_of(symbol + "_finish");
    ASSERT_TRUE(got && end);
    EXPECT_EQ(*got, (Counters{1, c.read, c.written})) << c.name;
    EXPECT_EQ(*end, (Counters{c.finish_read ? 1u : 0u, c.finish_read, c.finish_written})) << c.name;
  }
}

}  // namespace
}  // namespace tessera::test
