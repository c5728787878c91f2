// Products of eight-bit floats: by cuBLASLt where it takes them, else by our own kernels, and as
// CPUs compute them.
#include "core/ops/scaled_matmul.h"

#include <string>
#include <vector>

#include "core/autograd/autograd.h"
#include "core/backend/cuda/cublaslt.h"
#include "core/backend/cuda/ops/products.h"
#include "core/nn/nn.h"
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
  /// Compares with the CPU; `name` is the library's work, which is launched once.
  void expect(const Product& p, const char* name) {
    SCOPED_TRACE(fmt::format("{} {} to {}, {} x {} x {}{}", name_of(p.a), name_of(p.b),
                             name_of(p.out), p.m, p.n, p.k, p.bias ? " and a bias" : ""));
    const Tensor want = run(p, false);
    const double bound = p.out == kF32 ? 1e-5 : p.out == kF16 ? 2e-3 : 1.6e-2;
    sweep::expect_close(run(p, true), want, bound, "first use");  // which may time algorithms
    const int64_t before = runs_of(name);
    sweep::expect_close(run(p, true), want, bound, "library");
    if (before >= 0) {
      EXPECT_EQ(runs_of(name), before + 1);
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
// Sums and widths that are no multiples of 16 get zeros behind them.
TEST_F(CudaScaledMatmul, OfOtherWidths) {
  for (bool transposed : {false, true}) {
    expect({.k = 40, .transposed = transposed}, "cublasLt DEFAULT F8");
    expect({.k = 7, .bias = true, .transposed = transposed}, "cublasLt BIAS F8");
    expect({.n = 20, .bias = true, .transposed = transposed}, "cublasLt DEFAULT F8");
    expect({.a = kF8E5M2, .out = kF32, .m = 5, .n = 33, .k = 17, .transposed = transposed},
           "cublasLt DEFAULT F8");
  }
}

// The gradient of a weight is a sum over tokens.
TEST_F(CudaScaledMatmul, OfALayerWithAnyNumberOfTokens) {
  for (int64_t tokens : {1, 7, 32}) {
    SCOPED_TRACE(tokens);
    const auto gradients = [&](Device device) {
      auto layer = nn::linear({.in = 32, .out = 48, .bias = false});
      layer->init(1);
      layer->to(device);
      nn::convert_to_fp8(*layer);
      Tensor x = drawn({tokens, 32}, 1).to(device);
      x.requires_grad_();
      backward((*layer)(x), drawn({tokens, 48}, 2).to(device));
      return Tensors{x.grad().cpu(), layer->weight.grad().cpu()};
    };
    const Tensors want = gradients(kCPU);
    gradients(device_of(0));  // which may time algorithms
    const int64_t before = runs_of("cublasLt DEFAULT F8");
    const Tensors got = gradients(device_of(0));
    if (before >= 0) {
      EXPECT_EQ(runs_of("cublasLt DEFAULT F8"), before + 3);
    }
    for (int i = 0; i < 2; ++i) sweep::expect_close(got[i], want[i], 1e-5, "a gradient");
  }
}

}  // namespace
}  // namespace tessera::cuda
