// Products of 8-bit floats against sums in f64, and what they refuse.
#include "core/ops/scaled_matmul.h"

#include <gtest/gtest.h>

#include "core/autograd/autograd.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

Tensor eight(const Shape& s, DType t, uint64_t key) {
  return cast(sample_values(s, -9, 9, key), t);
}
Tensor one(double x) { return full({}, x, {.dtype = kF32}); }

TEST(ScaledMatmul, IsTheProductTimesBothScalesPlusTheBias) {
  const Tensor bias = cast(sample_values({5}, -3, 3, 3), kF32);
  for (const auto& [ta, tb] :
       {std::pair{kF8E4M3, kF8E4M3}, {kF8E4M3, kF8E5M2}, {kF8E5M2, kF8E4M3}}) {
    const Tensor a = eight({4, 7}, ta, 1), b = eight({5, 7}, tb, 2);
    const Tensor want = contract("mk,nk->mn", cast(a, kF64), cast(b, kF64)) * 0.75;
    for (const auto& [out, bound] : {std::pair{kF32, 1e-6}, {kBF16, 8e-3}, {kF16, 1e-3}}) {
      const Tensor y = scaled_matmul(a, b, one(0.25), one(3), out);
      EXPECT_EQ(y.dtype(), out);
      EXPECT_TRUE(allclose(cast(y, kF64), want, bound, bound));
      const Tensor with = scaled_matmul(a, b, one(0.25), one(3), out, bias);
      EXPECT_TRUE(allclose(cast(with, kF64), want + cast(bias, kF64), bound, 4 * bound));
    }
    EXPECT_TRUE(equal(
        scaled_matmul(permute(eight({7, 4}, ta, 1), {1, 0}), b, one(1), one(1), kF32),
        scaled_matmul(contiguous(permute(eight({7, 4}, ta, 1), {1, 0})), b, one(1), one(1), kF32)));
  }
}

TEST(ScaledMatmul, RefusesWhatNoCardMultiplies) {
  const Tensor a = eight({4, 8}, kF8E4M3, 1), b = eight({5, 8}, kF8E4M3, 2), s = one(1);
  const auto refused = [](auto&& f, const char* why) { expect_contains(error_of(f), why); };
  refused([&] { scaled_matmul(cast(a, kF8E5M2), cast(b, kF8E5M2), s, s, kF32); }, "one of them");
  refused([&] { scaled_matmul(cast(a, kF32), b, s, s, kF32); }, "expected a and b of f8e4m3");
  refused(
      [&] {
        scaled_matmul(a, eight({5, 7}, kF8E4M3, 2), s, s, kF32);
      },
      "a [M, K] and b [N, K]");
  refused([&] { scaled_matmul(a, b, s, ones({1}), kF32); }, "one float each");
  refused([&] { scaled_matmul(a, b, s, s, kF64); }, "out=f64");
  refused([&] { scaled_matmul(a, b, s, s, kF32, ones({4})); }, "a bias of 5 floats");
}

TEST(ScaledMatmul, HasNoDerivative) {
  Tensor s = one(1);
  s.requires_grad_();
  const Tensor y =
      scaled_matmul(eight({4, 8}, kF8E4M3, 1), eight({5, 8}, kF8E4M3, 2), s, one(1), kF32);
  EXPECT_THROW(backward(y, ones_like(y)), NotDifferentiable);
}

}  // namespace
}  // namespace tessera
