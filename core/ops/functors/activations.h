// The error function and the smooth activations with their derivatives, in the manner of math.h
// (include prelude.h, math.h and pieces.h first; those that look up in tables are templates, of
// floats and of groups of them). Invariant: a result never suffers from cancellation in its
// tail: gelu(-8), silu(-95) or erfc(9) are as accurate as at 1, and at +-inf functions take their
// limits (silu(-inf) = -0, not NaN). Bounds, float: erf, erfc, sigmoid, softplus and logsigmoid 2
// ulp; silu, gelu, mish 4 ulp; gelu_tanh 4 ulp or, below -2, 2^-24 absolutely; the derivatives,
// which cross zero, 4 ulp or 2^-22 absolutely.
#pragma once

namespace tessera::fn {

// ---- error function ----

// erf(a) for |a| <= 1.
TESSERA_FN float erf_core(float a) {
  const float z = a * a;
  float p = 7.80690316e-5f;
  p = fma(p, z, -0.00079978531f);
  p = fma(p, z, 0.0051871622f);
  p = fma(p, z, -0.0268533472f);
  p = fma(p, z, 0.112835787f);
  p = fma(p, z, -0.37612626f);
  p = fma(p, z, 0.128379166f);
  return fma(p, a, a);
}

// Above 1: 1 - exp(P(a)), where the exponential is at most 0.16 and needs few bits.
TESSERA_FN float erf(float x) {
  const float a = at_most(abs(x), 4.0f);
  float t = 0.000186375968f;
  t = fma(t, a, -0.00294762384f);
  t = fma(t, a, 0.0218379218f);
  t = fma(t, a, -0.103106461f);
  t = fma(t, a, -0.638145149f);
  t = fma(t, a, -1.12708902f);
  t = fma(t, a, -0.000341555802f);
  const float shifted = fma(t, 1.44269502f, kShifter + 127.0f);
  const float r = fma(shifted - (kShifter + 127.0f), -0.693147182f, t);
  const float scale = from_bits(static_cast<int>(static_cast<unsigned>(bits(shifted)) << 23));
  float p = 0.00829670019f;
  p = fma(p, r, 0.0419039726f);
  p = fma(p, r, 0.166675925f);
  p = fma(p, r, 0.49999103f);
  p = fma(p, r, 0.999999702f);
  const float outer = fma(-scale, fma(p, r, 1.0f), 1.0f);
  return copysign(a > 1.0f ? outer : erf_core(a), x);
}
TESSERA_FN double erf(double x) { return TESSERA_LIBM(erf)(x); }

// From 1/2 on, exp(-a^2) p / (1 + 2 a) with p nearly constant (Shepherd, Laframboise 1981,
// "Chebyshev approximation of (1+2x)exp(x^2)erfc(x) in 0<=x<inf"), a polynomial in q = 1 / (1 +
// 13/32 a). The rounding errors of a^2, d = 1 + 2 a, r = 1 / d, p and p r go into the exponential,
// with 1 / p taken as 0.87.
TESSERA_FN float erfc(float x) {
  const float a = at_most(abs(x), 10.2f), q = 1.0f / fma(0.40625f, a, 1.0f);
  float p = -0.279324442f;
  p = fma(p, q, 1.30229425f);
  p = fma(p, q, -2.14701223f);
  p = fma(p, q, 1.4841218f);
  p = fma(p, q, -1.04160666f);
  p = fma(p, q, 0.22618483f);
  p = fma(p, q, -0.0481833145f);
  p = fma(p, q, 0.146818727f);
  p = fma(p, q, 0.228282943f) * q;
  const float f = 1.12841368f + p, f_low = (1.12841368f - f) + p;
  const float d = fma(2.0f, a, 1.0f), d_low = (2.0f * a - d) + 1.0f, r = 1.0f / d;
  const float h = a * a, h_low = fma(a, a, -h), r_low = fma(-d, r, 1.0f) - d_low * r;
  const float t = f * r, t_low = fma(f, r, -t);
  const ExpParts e = exp_parts(-h, fma(0.87f, fma(t_low, d, f_low), r_low - h_low));
  const float tail = e.value * t * e.scale * e.scale;
  const float outer = x < 0.0f ? 2.0f - tail : tail;
  return a < 0.5f ? 1.0f - erf_core(x) : outer;
}
TESSERA_FN double erfc(double x) { return TESSERA_LIBM(erfc)(x); }

// ---- logistic family; e = exp(-|x|) never overflows ----

// For all x; the other sigmoid calls it from 15.49 on.
TESSERA_FN float sigmoid_far(float x) {
  const ExpParts p = exp_parts(-at_most(abs(x), 104.0f));
  const float e = p.value * p.scale * p.scale;
  // One quotient n / d with first-order terms for the rounding errors of n and d; 1 / d is v or 1 -
  // v.
  const bool negative = x < 0.0f;
  const float e_low = p.value_low * p.scale * p.scale, d = 1.0f + e, d_low = (1.0f - d) + e;
  const float v = (negative ? e : 1.0f) / d;
  return fma(fma(-v, d_low, negative ? e_low : 0.0f), negative ? 1.0f - v : v, v);
}
// sigmoid(-u) for 0 <= u <= 15.49. d lies below the middle of its piece, where all terms of the
// polynomial have one sign.
constexpr float kSigmoidEnd = 15.49f;
template <class F>
TESSERA_FN F sigmoid_below(F u) {
  const F index = u + F(kShifter);
  return polynomial(kSigmoid, index, u - (index - kShifter) - 0.5f);
}
template <class F>
TESSERA_FN F sigmoid(F x) {
  const F one = copysign(F(0.5f), x) + F(0.5f);  // where x > 0, else 0
  return beyond<sigmoid_far>(kSigmoidEnd, x, abs(one - sigmoid_below(abs(x))));
}
TESSERA_FN double sigmoid(double x) {
  const double e = exp(-abs(x));
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

TESSERA_FN float softplus(float x) {
  const ExpParts p = exp_parts(-at_most(abs(x), 104.0f));
  return at_least(x, 0.0f) + log1p_core(p.value * p.scale * p.scale, 0.0f);
}
TESSERA_FN double softplus(double x) { return (x > 0.0 ? x : 0.0) + log1p(exp(-abs(x))); }

TESSERA_FN float logsigmoid(float x) { return -softplus(-x); }
TESSERA_FN double logsigmoid(double x) { return -softplus(-x); }

// x sigmoid(x) = max(x, 0) - u sigmoid(-u), u = |x|. Far below 0, x exp(x) / (1 + exp(x)) with the
// scale applied last: exp(x) may be denormal when x exp(x) is not.
TESSERA_FN float silu_far(float x) {
  const float y = at_least(x, -112.0f);
  const ExpParts p = exp_parts(-at_most(abs(y), 112.0f));
  const float quotient = y / (1.0f + p.value * p.scale * p.scale);
  return x < 0.0f ? quotient * p.value * p.scale * p.scale : quotient;
}
template <class F>
TESSERA_FN F silu(F x) {
  const F u = abs(x);
  return beyond<silu_far>(kSigmoidEnd, x, fma(-u, sigmoid_below(u), at_least(x, -0.0f)));
}
TESSERA_FN double silu(double x) { return x < -800.0 ? -0.0 : x * sigmoid(x); }

// x tanh(softplus(x)) = x w / (w + 2) with n = exp(x), w = n (n + 2).
TESSERA_FN float mish(float x) {
  const float y = at_least(x, -112.0f);
  const ExpParts p = exp_parts(at_most(y, 20.0f));
  const float n = p.value * p.scale * p.scale, n2 = n + 2.0f;
  return y * (n2 / fma(n, n2, 2.0f)) * p.value * p.scale * p.scale;
}
TESSERA_FN double mish(double x) {
  const double n = exp(x > 40.0 ? 40.0 : x), w = n * (n + 2.0);
  return x < -800.0 ? -0.0 : x * (w / (w + 2.0));
}

// ---- gelu(x) = x Phi(x), Phi the normal distribution ----

// u Phi(-u) = u exp(-u^2 / 2) q P(q) for u = |x| <= 14.4, q = 1 / (1 + 9/32 u). The exponential is
// 1 + r e times a power of two, r what that leaves of h = u^2: the coefficients of e are those of
// exp times powers of -1/2. Added to r are the rounding error of h and what the rounding errors of
// d and q do to q P(q), whose logarithm changes about 1 + 1.85 q times as fast as that of q. The
// scale is 2^64 times too large before the last product, which alone can be denormal.
TESSERA_FN float gelu_far(float x) {
  constexpr float kShift = kShifter + 127.0f + 64.0f, kTiny = 5.42101086e-20f;  // 2^-64
  const float u = at_most(abs(x), 14.4f), h = u * u;
  const float d = fma(0.28125f, u, 1.0f), q = 1.0f / d;
  const float d_low = fma(0.28125f, u, 1.0f - d), q_low = fma(-d_low, q, fma(-d, q, 1.0f));
  const float low = fma(fma(-3.7f, q, -2.0f), q_low, fma(u, u, -h));
  const float shifted = fma(h, -0.721347511f, kShift), n = shifted - kShift;
  const float r = fma(n, 2.85721354e-6f, fma(n, 1.3862915f, h)) + low;
  float e = 0.00138471415f / 64;
  e = fma(e, r, -0.00836999342f / 32);
  e = fma(e, r, 0.041668009f / 16);
  e = fma(e, r, -0.166665092f / 8);
  e = fma(e, r, 0.49999994f / 4);
  e = fma(e, r, -0.5f);
  float p = -0.0136088012f;
  p = fma(p, q, 0.0940708816f);
  p = fma(p, q, -0.243062004f);
  p = fma(p, q, 0.271890432f);
  p = fma(p, q, -0.141503125f);
  p = fma(p, q, 0.136692926f);
  p = fma(p, q, 0.0644424036f);
  p = fma(p, q, 0.107023597f);
  p = fma(p, q, 0.11183542f);
  p = fma(p, q, 0.112218276f);
  const float t = u * q * p, part = fma(t, e * r, t) * power_of_two(shifted) * kTiny;
  return x < 0.0f ? -part : x - part;
}

// x Phi(x) = max(x, 0) - u Phi(-u), u = |x|, with Phi(-u) as the square of a piecewise polynomial,
// because the root changes half as fast. As in sigmoid, d lies below the middle of its piece.
template <class F>
TESSERA_FN F gelu(F x) {
  const F u = abs(x), index = u + F(kHalves);
  const F root = polynomial(kNormalRoot, index, u - (index - kHalves) - 0.25f);
  return beyond<gelu_far>(5.25f, x, fma(-(u * root), root, at_least(x, -0.0f)));
}
TESSERA_FN double gelu(double x) {
  return x < -40.0 ? -0.0 : x * 0.5 * erfc(x * -0.7071067811865476);
}

// The slope of an activation at x, whose pieces hold that at -u with its sign changed: the slopes
// at u and -u add up to 1.
template <class F, int D>
TESSERA_FN F slope(const Pieces<D>& pieces, F x) {
  const F u = at_most(abs(x), 7.5f), index = u + F(kHalves);
  const F part = polynomial(pieces, index, u - (index - kHalves));
  return (copysign(F(0.5f), x) + F(0.5f)) + flipped(part, x);
}
// Phi(x) + x phi(x)
template <class F>
TESSERA_FN F gelu_grad(F x) {
  return slope(kNormalSlope, x);
}
TESSERA_FN double gelu_grad(double x) {
  const double u = abs(x) > 40.0 ? copysign(40.0, x) : x;
  return 0.5 * erfc(u * -0.7071067811865476) + u * 0.3989422804014327 * exp(-0.5 * u * u);
}

// x (1 + tanh(w / 2)) / 2 = x sigmoid(w), w = sqrt(8 / pi) (x + 0.044715 x^3), as in silu; 0 below
// -7.25, where it is 1e-16.
template <class F>
TESSERA_FN F gelu_tanh(F x) {
  const F u = at_most(abs(x), 7.5f), index = u + F(kHalves);
  return fma(-u, polynomial(kLogistic, index, u - (index - kHalves)), at_least(x, -0.0f));
}
TESSERA_FN double gelu_tanh(double x) {
  return x < -20.0 ? -0.0 : x * sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * x * x));
}

// sigmoid(w) + x w'(x) sigmoid(w) sigmoid(-w)
template <class F>
TESSERA_FN F gelu_tanh_grad(F x) {
  return slope(kLogisticSlope, x);
}
TESSERA_FN double gelu_tanh_grad(double x) {
  const double u = abs(x) > 20.0 ? copysign(20.0, x) : x, z = u * u;
  const double s = sigmoid(u * (1.5957691216057308 + 0.07135481627260025 * z));
  return s + u * (1.5957691216057308 + 0.2140644488178007 * z) * s * (1.0 - s);
}

}  // namespace tessera::fn
