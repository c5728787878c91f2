// Products of eight-bit floats: by cuBLASLt where it takes them, else by our own kernels, and as
// CPUs compute them.
#include "core/ops/scaled_matmul.h"

#include <string>
#include <vector>

#include "core/backend/cuda/cublaslt.h"
#include "core/backend/cuda/ops/products.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/views.h"
#include "tests/core/ops/sweep.h"
#include "tests/cuda/card.h"
#include "tests/cuda/counters.h"

namespace tessera::cuda {
namespace {

Tensor drawn(const Shape& s, int64_t seed) {
  return (rand(s, {kF32}, from_values<int64_t>({seed, 8}, {2})) - 0.5) * 6.0;
}

class CudaScaledMatmul : public OnCard {
 protected:
  void SetUp() override {
    OnCard::SetUp();
    if (device_count() && !cublaslt()) GTEST_SKIP() << why_no_cublaslt();
  }
  struct Product {
    DType a = kF8E4M3, b = kF8E4M3, out = kBF16;
    int64_t m = 20, n = 48, k = 64;
    bool bias = false, transposed = false;
  };
  Tensors operands(const Product& p) const {
    const auto matrix = [&](int64_t rows, int64_t columns, DType t, int64_t seed) {
      return p.transposed ? permute(cast(drawn({columns, rows}, seed), t), {1, 0})
                          : cast(drawn({rows, columns}, seed), t);
    };
    Tensors in{matrix(p.m, p.k, p.a, 1), matrix(p.n, p.k, p.b, 2), full({}, 0.75, {kF32}),
               full({}, 0.3, {kF32})};
    in.push_back(p.bias ? cast(drawn({p.n}, 3), p.out) : Tensor());
    return in;
  }
  Tensor run(const Product& p, bool on_card) const {
    Tensors in = operands(p);
    if (on_card)
      for (Tensor& t : in)
        if (t.defined()) t = t.to(device_of(0));
    return scaled_matmul(in[0], in[1], in[2], in[3], p.out, in[4]).cpu();
  }
  /// Compares with the CPU; `name` is the library's work, which is launched once, or null.
  void expect(const Product& p, const char* name) {
    SCOPED_TRACE(fmt::format("{} {} to {}, {} x {} x {}{}", name_of(p.a), name_of(p.b),
                             name_of(p.out), p.m, p.n, p.k, p.bias ? " and a bias" : ""));
    const char* counted = name ? name : p.bias ? "cublasLt BIAS F8" : "cublasLt DEFAULT F8";
    const Tensor want = run(p, false);
    const double bound = p.out == kF32 ? 1e-5 : p.out == kF16 ? 2e-3 : 1.6e-2;
    sweep::expect_close(run(p, true), want, bound, "first use");  // which may time algorithms
    const int64_t before = runs_of(counted);
    sweep::expect_close(run(p, true), want, bound, "library");
    if (before >= 0) {
      EXPECT_EQ(runs_of(counted), before + (name ? 1 : 0));
    }
    const OwnProducts own;
    sweep::expect_close(run(p, true), want, bound, "own kernels");
  }
};

TEST_F(CudaScaledMatmul, OfEachFormatAndResult) {
  for (const auto& [a, b] : {std::pair{kF8E4M3, kF8E4M3}, {kF8E4M3, kF8E5M2}, {kF8E5M2, kF8E4M3}})
    for (DType out : {kBF16, kF16, kF32}) {
      expect({.a = a, .b = b, .out = out}, "cublasLt DEFAULT F8");
      // The library adds no single bias beside eight bits.
      expect({.a = a, .b = b, .out = out, .bias = true},
             out == kF32 ? "cublasLt DEFAULT F8" : "cublasLt BIAS F8");
    }
}
TEST_F(CudaScaledMatmul, OfTransposedOperandsAndFewRows) {
  expect({.transposed = true}, "cublasLt DEFAULT F8");
  expect({.m = 1}, "cublasLt DEFAULT F8");
}
TEST_F(CudaScaledMatmul, OfOtherWidthsByOurOwnKernels) {
  expect({.k = 40}, nullptr);
  expect({.n = 20, .bias = true}, nullptr);
}

}  // namespace
}  // namespace tessera::cuda
