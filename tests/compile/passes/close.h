// Compares results of two graphs whose sums may have different orders.
#pragma once
#include <cmath>

#include "tests/compile/bits.h"

namespace tessera::test {

/// |a - b| <= of_dtype * max(1, largest |b| of the tensor), where of_dtype is `f64` or, for
/// narrower floats, `f32`, `f16`, `bf16`. 0: equal bits.
struct Tolerance {
  double f64 = 0, f32 = 0, f16 = 0, bf16 = 0;
  double of(DType t) const { return t == kF64 ? f64 : t == kF32 ? f32 : t == kF16 ? f16 : bf16; }
};

inline void expect_close(const Tensor& a, const Tensor& b, const Tolerance& tolerance,
                         const std::string& what) {
  NoGrad off;
  ASSERT_EQ(describe(a), describe(b)) << what;
  ASSERT_EQ(a.strides(), b.strides()) << what;
  double bound = is_floating(a.dtype()) ? tolerance.of(a.dtype()) : 0;
  if (bound == 0) return expect_same_bits(a, b, what);
  Tensor x = contiguous(a.to(kF64)).cpu(), y = contiguous(b.to(kF64)).cpu();
  double largest = 1;
  for (int64_t i = 0; i < y.numel(); ++i)
    if (double v = std::abs(y.data<double>()[i]); std::isfinite(v)) largest = std::max(largest, v);
  for (int64_t i = 0; i < y.numel(); ++i) {
    double p = x.data<double>()[i], q = y.data<double>()[i];
    bool equal = std::isnan(p) ? std::isnan(q) : p == q || std::abs(p - q) <= bound * largest;
    if (!equal) {
      ADD_FAILURE() << what << "\nelement " << i << ": " << p << ", expected " << q;
      return;
    }
  }
}

inline void expect_close(std::span<const Tensor> a, std::span<const Tensor> b,
                         const Tolerance& tolerance, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i)
    expect_close(a[i], b[i], tolerance, what + "result " + std::to_string(i));
}

}  // namespace tessera::test
