// Functions of elements that are compositions of the primitives in pointwise.h and reduce.h. Names
// and conventions are PyTorch's.
#pragma once
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"

namespace tessera {

// arithmetic
/// The n-th derivative of digamma; n is 0 or 1.
Tensor polygamma(int64_t n, const Tensor& x);
Tensor frac(const Tensor& x);                                // x - trunc(x)
Tensor round(const Tensor& x, int64_t decimals);             // half to even, at a decimal place
Tensor signbit(const Tensor& x);                             // bool; true for -0, false for NaN
Tensor copysign(const Tensor& x, const Tensor& y);           // magnitude of x, sign of y
Tensor add(const Tensor& a, const Tensor& b, Scalar alpha);  // a + alpha b
Tensor addcmul(const Tensor& a, const Tensor& b, const Tensor& c,
               Scalar value = 1);  // a + value b c
Tensor addcdiv(const Tensor& a, const Tensor& b, const Tensor& c,
               Scalar value = 1);                    // a + value b / c
Tensor div_trunc(const Tensor& a, const Tensor& b);  // rounds towards zero
Tensor clamp_min(const Tensor& x, Scalar low);
Tensor clamp_max(const Tensor& x, Scalar high);
inline Tensor clip(const Tensor& x, Scalar low, Scalar high) { return clamp(x, low, high); }
Tensor float_power(const Tensor& x, const Tensor& exponent);  // in f64
Tensor float_power(const Tensor& x, Scalar exponent);
/// [N] -> [N, columns]: powers of x, falling to 0 or from 0 on. columns -1: N.
Tensor vander(const Tensor& x, int64_t columns = -1, bool increasing = false);
Tensor fmax(const Tensor& a, const Tensor& b);  // the other one where one is NaN
Tensor fmin(const Tensor& a, const Tensor& b);
Tensor deg2rad(const Tensor& x);
Tensor rad2deg(const Tensor& x);
Tensor hypot(const Tensor& a, const Tensor& b);      // sqrt(a^2 + b^2) without overflow
Tensor xlogy(const Tensor& x, const Tensor& y);      // x log(y), 0 where x is 0
Tensor logaddexp(const Tensor& a, const Tensor& b);  // log(exp(a) + exp(b)) without overflow
Tensor logaddexp2(const Tensor& a, const Tensor& b);
Tensor logit(const Tensor& x);  // log(x / (1 - x))
Tensor sinc(const Tensor& x);   // sin(pi x) / (pi x), 1 at 0
Tensor nan_to_num(const Tensor& x, double nan = 0, std::optional<double> posinf = {},
                  std::optional<double> neginf = {});

// comparison
/// |a - b| <= atol + rtol |b|, or equal.
Tensor isclose(const Tensor& a, const Tensor& b, double rtol = 1e-5, double atol = 1e-8,
               bool equal_nan = false);
bool allclose(const Tensor& a, const Tensor& b, double rtol = 1e-5, double atol = 1e-8,
              bool equal_nan = false);
/// Same shape and equal values.
bool equal(const Tensor& a, const Tensor& b);

// activations
Tensor relu6(const Tensor& x);
Tensor hardtanh(const Tensor& x, Scalar low = -1.0, Scalar high = 1.0);
Tensor hardsigmoid(const Tensor& x);  // clamp(x / 6 + 1/2, 0, 1)
Tensor hardswish(const Tensor& x);    // x hardsigmoid(x): Howard et al. 2019
Tensor softsign(const Tensor& x);     // x / (1 + |x|)
Tensor tanhshrink(const Tensor& x);
Tensor softshrink(const Tensor& x, double lambda = 0.5);
Tensor hardshrink(const Tensor& x, double lambda = 0.5);
Tensor threshold(const Tensor& x, Scalar above, Scalar value);  // x where it is above, else value
Tensor softplus(const Tensor& x, double beta,
                double threshold = 20);  // log(1 + exp(beta x)) / beta
Tensor celu(const Tensor& x, double alpha = 1);
Tensor selu(const Tensor& x);                         // Klambauer et al. 2017
Tensor softmin(const Tensor& x, int64_t dim = -1);    // softmax(-x)
Tensor glu(const Tensor& x, int64_t dim = -1);        // first half times sigmoid of the second
Tensor prelu(const Tensor& x, const Tensor& weight);  // weight [1], or one per channel (dim 1)

// products and reductions
Tensor outer(const Tensor& a, const Tensor& b);                    // [N], [M] -> [N, M]
Tensor cross(const Tensor& a, const Tensor& b, int64_t dim = -1);  // of vectors of 3 elements
Tensor nansum(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
Tensor nanmean(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
Tensor count_nonzero(const Tensor& x, const Dims& dims = {});
/// Cosine of the angle between a and b along `dim`; norms count as at least eps.
Tensor cosine_similarity(const Tensor& a, const Tensor& b, int64_t dim = 1, double eps = 1e-8);
/// norm(a - b + eps) over the last dim.
Tensor pairwise_distance(const Tensor& a, const Tensor& b, double p = 2, double eps = 1e-6,
                         bool keepdim = false);
/// x / max(norm(x), eps) along `dim`.
Tensor normalize(const Tensor& x, double p = 2, int64_t dim = 1, double eps = 1e-12);

/// `count` values base^first to base^last.
Tensor logspace(double first, double last, int64_t count, double base = 10,
                TensorOptions options = {});

}  // namespace tessera
