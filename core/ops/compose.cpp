// Where the branch of a select that is not taken would be infinite or NaN, its operand is replaced
// before it is computed: selecting afterwards lets NaN into the gradient (0 times infinity).
#include "core/ops/compose.h"

#include <cmath>
#include <limits>

#include "core/dispatch/context.h"
#include "core/dispatch/precision.h"
#include "core/ops/fused.h"
#include "core/ops/scalar_range.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

Tensor number(Scalar v, const Tensor& like) { return number_beside(like, v, like.dtype()); }
Tensor zero(const Tensor& like) { return number(0, like); }
DType float_of(DType t) { return is_floating(t) ? t : context().default_dtype; }
Tensor as_float(const Tensor& x) { return cast(x, float_of(x.dtype())); }

// The dtype in which operands meet.
DType meeting(const Tensor& x) { return x.dtype(); }
DType meeting(const Tensor& a, const Tensor& b) { return result_type(a, b); }
DType meeting(const Tensor& a, const Tensor& b, const Tensor& c) {
  const DType t = result_type(a, b);
  if (t == c.dtype()) return t;
  return result_type(empty(broadcast(a.shape(), b.shape(), "operands"), t, kMeta), c);
}

// Runs `steps` on operands converted to the float dtype in which they meet. Those of 16 bits are
// computed in f32: the result is rounded once, and no step overflows.
template <class Steps, class... Operands>
Tensor composed(const Steps& steps, const Operands&... x) {
  const DType t = float_of(meeting(x...)), wide = size_of(t) == 2 ? kF32 : t;
  return cast(steps(cast(x, wide)...), t);
}

// The largest finite value of a float dtype.
double largest(DType t) {
  switch (t) {
    case kF16: return 65504;
    case kBF16: return 0x1.fep127;
    case kF64: return std::numeric_limits<double>::max();
    default: return double(std::numeric_limits<float>::max());
  }
}

}  // namespace

Tensor polygamma(int64_t n, const Tensor& x) {
  TESSERA_CHECK(n == 0 || n == 1, "polygamma: order {}; orders 0 and 1 are there", n);
  return n == 0 ? digamma(x) : trigamma(x);
}
Tensor frac(const Tensor& x) { return x - trunc(x); }

Tensor round(const Tensor& x, int64_t decimals) {
  double scale = std::pow(10.0, double(std::abs(decimals)));
  if (is_integral(x.dtype()))
    return decimals >= 0 ? x : cast(round(cast(x, kF64) / scale) * scale, x.dtype());
  return composed(
      [&](const Tensor& f) {
        return decimals >= 0 ? round(f * scale) / scale : round(f / scale) * scale;
      },
      x);
}

Tensor signbit(const Tensor& x) {
  if (is_integral(x.dtype())) return lt(x, 0);
  return logical_or(lt(x, 0), logical_and(eq(x, 0), lt(reciprocal(x), 0)));
}

Tensor copysign(const Tensor& x, const Tensor& y) {
  Tensor f = cast(x, float_of(result_type(x, y)));
  return where(ne(signbit(f), signbit(y)), -f, f);
}

Tensor add(const Tensor& a, const Tensor& b, Scalar alpha) { return a + b * alpha; }
Tensor addcmul(const Tensor& a, const Tensor& b, const Tensor& c, Scalar value) {
  auto steps = [&](const Tensor& p, const Tensor& q, const Tensor& r) { return p + q * value * r; };
  return is_floating(meeting(a, b, c)) ? composed(steps, a, b, c) : steps(a, b, c);
}
Tensor addcdiv(const Tensor& a, const Tensor& b, const Tensor& c, Scalar value) {
  return composed(
      [&](const Tensor& p, const Tensor& q, const Tensor& r) { return p + q * value / r; }, a, b,
      c);
}

Tensor div_trunc(const Tensor& a, const Tensor& b) {
  DType t = result_type(a, b);
  if (is_floating(t))
    return composed([](const Tensor& p, const Tensor& q) { return trunc(p / q); }, a, b);
  // Exact for integers: what is left after the remainder of C divides evenly.
  return floor_divide(a - fmod(a, b), b);
}

// As clamp, nothing passes at the bound itself or for NaN.
Tensor clamp_min(const Tensor& x, Scalar low) {
  const Scalar bound = nearest_in(result_type(x, low), low);
  return where(gt(x, bound), x, maximum(x.detach(), bound));
}
Tensor clamp_max(const Tensor& x, Scalar high) {
  const Scalar bound = nearest_in(result_type(x, high), high);
  return where(lt(x, bound), x, minimum(x.detach(), bound));
}

Tensor float_power(const Tensor& x, const Tensor& exponent) {
  return pow(cast(x, kF64), cast(exponent, kF64));
}
Tensor float_power(const Tensor& x, Scalar exponent) { return pow(cast(x, kF64), exponent.real()); }
Tensor vander(const Tensor& x, int64_t columns, bool increasing) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() == 1 && columns >= -1,
                   "vander: {} columns of powers of {}; takes [N]", columns, describe(x));
  const int64_t n = columns < 0 ? x.numel() : columns;
  const Tensor up = arange(0, n, 1, {.device = x.device()});
  return pow(unsqueeze(x, 1), cast(increasing ? up : (n - 1) - up, x.dtype()));
}

Tensor fmax(const Tensor& a, const Tensor& b) {
  return where(isnan(b), a, where(isnan(a), b, maximum(a, b)));
}
Tensor fmin(const Tensor& a, const Tensor& b) {
  return where(isnan(b), a, where(isnan(a), b, minimum(a, b)));
}
Tensor deg2rad(const Tensor& x) { return as_float(x) * (M_PI / 180); }
Tensor rad2deg(const Tensor& x) { return as_float(x) * (180 / M_PI); }

Tensor hypot(const Tensor& x, const Tensor& y) {
  return composed(
      [](const Tensor& a, const Tensor& b) {
        // The scale is a constant for the gradient: it cancels.
        Tensor scale = maximum(abs(a.detach()), abs(b.detach()));
        Tensor usable = logical_and(isfinite(scale), gt(scale, 0));
        scale = where(usable, scale, number(1.0, scale));
        return sqrt(square(a / scale) + square(b / scale)) * scale;
      },
      x, y);
}

Tensor xlogy(const Tensor& x, const Tensor& y) {
  return composed(
      [](const Tensor& a, const Tensor& b) {
        Tensor none = logical_and(eq(a, 0), logical_or(le(b, 0), isinf(b)));
        return a * log(where(none, number(1.0, b), b));
      },
      x, y);
}

Tensor logaddexp(const Tensor& x, const Tensor& y) {
  return composed(
      [](const Tensor& a, const Tensor& b) {
        Tensor same = logical_and(isinf(a), eq(a, b));  // their difference would be NaN
        Tensor apart = where(same, zero(a), a) - where(same, zero(b), b);
        return where(same, a, maximum(a, b) + log1p(exp(-abs(apart))));
      },
      x, y);
}
Tensor logaddexp2(const Tensor& x, const Tensor& y) {
  return composed(
      [](const Tensor& a, const Tensor& b) {
        return logaddexp(a * std::log(2.0), b * std::log(2.0)) / std::log(2.0);
      },
      x, y);
}
Tensor logit(const Tensor& x) {
  return composed([](const Tensor& p) { return log(p / (1.0 - p)); }, x);
}

Tensor sinc(const Tensor& x) {
  return composed(
      [](const Tensor& f) {
        // So near to 0 it is 1 and flat, and the quotients of its derivative leave the floats.
        Tensor flat = le(abs(f.detach()), f.dtype() == kF64 ? 0x1p-900 : 0x1p-100),
               one = number(1.0, f), safe = where(flat, one, f) * M_PI;
        return where(flat, one, sin(safe) / safe);
      },
      x);
}

Tensor nan_to_num(const Tensor& x, double nan, std::optional<double> posinf,
                  std::optional<double> neginf) {
  if (is_integral(x.dtype())) return x;
  double top = largest(x.dtype());
  Tensor y = where(isnan(x), number(nan, x), x);
  y = where(eq(x, std::numeric_limits<double>::infinity()), number(posinf.value_or(top), x), y);
  return where(eq(x, -std::numeric_limits<double>::infinity()), number(neginf.value_or(-top), x),
               y);
}

Tensor isclose(const Tensor& a, const Tensor& b, double rtol, double atol, bool equal_nan) {
  TESSERA_CHECK(a.dtype() == b.dtype(), "isclose: {} and {}; convert them to one dtype",
                describe(a), describe(b));
  Tensor x = as_float(a), y = as_float(b);
  Tensor near = logical_and(le(abs(x - y), abs(y) * rtol + atol), isfinite(y));
  near = logical_or(near, eq(a, b));
  return equal_nan ? logical_or(near, logical_and(isnan(x), isnan(y))) : near;
}
bool allclose(const Tensor& a, const Tensor& b, double rtol, double atol, bool equal_nan) {
  return all(isclose(a, b, rtol, atol, equal_nan)).item<bool>();
}
bool equal(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && all(eq(a.detach(), b.detach())).item<bool>();
}

Tensor relu6(const Tensor& x) { return hardtanh(x, 0, 6); }
Tensor hardtanh(const Tensor& x, Scalar low, Scalar high) { return clamp(x, low, high); }
Tensor hardsigmoid(const Tensor& x) { return clamp(x + 3.0, 0, 6) / 6.0; }
Tensor hardswish(const Tensor& x) { return x * hardsigmoid(x); }
Tensor softsign(const Tensor& x) { return x / (abs(x) + 1.0); }
Tensor tanhshrink(const Tensor& x) {
  return composed([](const Tensor& f) { return f - tanh(f); }, x);
}
Tensor softshrink(const Tensor& x, double lambda) {
  return where(gt(x, lambda), x - lambda,
               where(lt(x, -lambda), x + lambda, where(isnan(x), x, zero(x))));
}
Tensor hardshrink(const Tensor& x, double lambda) { return where(le(abs(x), lambda), zero(x), x); }
Tensor threshold(const Tensor& x, Scalar above, Scalar value) {
  return where(le(x, above), number(value, x), x);
}

Tensor softplus(const Tensor& x, double beta, double threshold) {
  return composed(
      [&](const Tensor& f) {
        Tensor scaled = f * beta;
        return where(gt(scaled, threshold), f, softplus(scaled) / beta);
      },
      autocast_operand(Precision::kWide, x));
}

Tensor celu(const Tensor& x, double alpha) {
  return composed([&](const Tensor& f) { return elu(f / alpha, 1.0) * alpha; }, x);
}
Tensor selu(const Tensor& x) {
  constexpr double kAlpha = 1.6732632423543772848170429916717,
                   kScale = 1.0507009873554804934193349852946;
  return composed([](const Tensor& f) { return elu(f, kAlpha) * kScale; }, x);
}

Tensor softmin(const Tensor& x, int64_t dim) { return softmax(-x, dim); }

Tensor glu(const Tensor& x, int64_t dim) {
  int d = wrap_dim(dim, x.ndim(), "glu");
  TESSERA_CHECK_AS(ShapeError, x.ndim() > 0 && x.shape()[d] % 2 == 0,
                   "glu: dim {} of {} must be even", d, describe(x));
  int64_t half = x.shape()[d] / 2;
  return narrow(x, d, 0, half) * sigmoid(narrow(x, d, half, half));
}

Tensor prelu(const Tensor& x, const Tensor& weight) {
  Tensor w = weight;
  if (w.numel() > 1) {
    TESSERA_CHECK_AS(ShapeError, x.ndim() >= 2 && x.shape()[1] == w.numel(),
                     "prelu: {} weights for {}; one per channel (dim 1), or a single one",
                     w.numel(), describe(x));
    Shape s = Dims::filled(x.ndim(), 1);
    s[1] = w.numel();
    w = reshape(w, s);
  }
  return leaky_relu(x, w);
}

Tensor outer(const Tensor& a, const Tensor& b) {
  TESSERA_CHECK_AS(ShapeError, a.ndim() == 1 && b.ndim() == 1, "outer: {} and {} are not vectors",
                   describe(a), describe(b));
  return unsqueeze(a, 1) * b;
}

Tensor cross(const Tensor& a, const Tensor& b, int64_t dim) {
  Shape s = broadcast(a.shape(), b.shape(), "cross");
  int d = wrap_dim(dim, s.size(), "cross");
  TESSERA_CHECK_AS(ShapeError, s.size() > 0 && s[d] == 3, "cross: dim {} of {} has not 3 elements",
                   d, to_string(s));
  Tensor x = expand(a, s), y = expand(b, s);
  Tensor parts[3];
  for (int i = 0; i < 3; ++i) {
    int j = (i + 1) % 3, k = (i + 2) % 3;
    parts[i] = select(x, d, j) * select(y, d, k) - select(x, d, k) * select(y, d, j);
  }
  return stack(parts, d);
}

Tensor nansum(const Tensor& x, const Dims& dims, bool keepdim) {
  return sum(where(isnan(x), zero(x), x), dims, keepdim);
}
Tensor nanmean(const Tensor& x, const Dims& dims, bool keepdim) {
  return nansum(x, dims, keepdim) / cast(sum(logical_not(isnan(x)), dims, keepdim), x.dtype());
}
Tensor count_nonzero(const Tensor& x, const Dims& dims) { return sum(ne(x, 0), dims); }

Tensor cosine_similarity(const Tensor& a, const Tensor& b, int64_t dim, double eps) {
  auto [x, y] = std::pair(as_float(a), as_float(b));
  Shape s = broadcast(x.shape(), y.shape(), "cosine_similarity");
  x = expand(x, s), y = expand(y, s);
  x = x / clamp_min(norm(x, 2, {dim}, true), eps), y = y / clamp_min(norm(y, 2, {dim}, true), eps);
  return sum(x * y, {dim});
}
Tensor pairwise_distance(const Tensor& a, const Tensor& b, double p, double eps, bool keepdim) {
  return norm(a - b + eps, p, {-1}, keepdim);
}
Tensor normalize(const Tensor& x, double p, int64_t dim, double eps) {
  return x / clamp_min(norm(x, p, {dim}, true), eps);
}

Tensor logspace(double first, double last, int64_t count, double base, TensorOptions o) {
  DType t = o.dtype.value_or(context().default_dtype);
  Tensor exponents = linspace(first, last, count, {.dtype = kF64, .device = o.device});
  return cast(pow(scalar_tensor(base, kF64, o.device), exponents), t);
}

}  // namespace tessera
