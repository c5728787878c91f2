// Exponentials, logarithms, powers, roots and hyperbolic functions of one scalar, as text that a
// compiler can turn into vector code: every function is a straight line of arithmetic and selects,
// without branches on data, and without tables but where it says so. Include prelude.h first.
// Invariant: float results are within 2 ulp for every argument, denormals included, and special
// values are those of C's Annex F; the same bits come out on every target (see prelude.h). Double
// forms call the platform's libm.
//
// Common method: subtract a multiple of ln 2 held in two parts (Cody, Waite 1980, "Software Manual
// for the Elementary Functions"), evaluate a minimax polynomial (scripts/make_math_coefficients.py
// prints all of them), and rebuild through the exponent bits (Muller et al., "Handbook of
// Floating-Point Arithmetic", 2nd ed., chapter 10).
#pragma once

namespace tessera::fn {

// Bounds that keep NaN: a comparison with NaN is false and the argument goes through.
TESSERA_FN float at_most(float x, float bound) { return x > bound ? bound : x; }
TESSERA_FN float at_least(float x, float bound) { return x < bound ? bound : x; }

// 1.5 * 2^23: adding it rounds a float below 2^22 to an integer and leaves that integer in the low
// bits of the sum.
constexpr float kShifter = 12582912.0f;

// ---- exponentials ----

// exp(x) = value * scale * scale. The scale is a power of two with half of the exponent, so that
// multiplying twice overflows to inf and rounds once into the denormals with no test for either;
// value lies in [0.5, 2]. value_low is the rounding error of value, for those that need a little
// more.
struct ExpParts {
  float value, scale, value_low;
};

// Parts of exp(x + low) for -112 <= x <= 90 and |low| far below 1. NaN stays in value. The rounding
// errors of r and of 1 + r are kept, which leaves value within 1 ulp and room for the functions
// built on it.
TESSERA_FN ExpParts exp_parts(float x, float low) {
  const float shifted =
      fma(x, 0.721347511f, kShifter + 127.0f);  // x / (2 ln 2); 127 is the bias of the exponent
  const float k = shifted - (kShifter + 127.0f);
  const float r1 = fma(k, -1.38629436f, x);  // exact
  const float rest = fma(k, 3.80930842e-9f, low), r = r1 + rest, r_low = (r1 - r) + rest;
  const float v = 1.0f + r, v_low = (1.0f - v) + r;
  float p = 2.57939937e-5f;
  p = fma(p, r, 0.000201600167f);
  p = fma(p, r, 0.00138830568f);
  p = fma(p, r, 0.00833218731f);
  p = fma(p, r, 0.0416667536f);
  p = fma(p, r, 0.166666791f);
  p = fma(p, r, 0.5f);
  p = fma(p, r * r, fma(r_low, v, v_low));
  const float value = v + p,
              scale = from_bits(static_cast<int>(static_cast<unsigned>(bits(shifted)) << 23));
  return {value, scale, (v - value) + p};
}
TESSERA_FN ExpParts exp_parts(float x) { return exp_parts(x, 0.0f); }

TESSERA_FN float exp(float x) {
  const ExpParts e = exp_parts(at_least(at_most(x, 89.0f), -104.0f));
  return e.value * e.scale * e.scale;
}
TESSERA_FN double exp(double x) { return TESSERA_LIBM(exp)(x); }

// 2^n of shifted = kShifter + 127 + n, for -127 < n < 128, and 0 for n = -127.
TESSERA_FN float power_of_two(float shifted) {
  return from_bits(static_cast<int>(static_cast<unsigned>(bits(shifted)) << 23));
}

// exp(x) for x <= 88, for F a float or a group of floats, with 7 multiplications: exp(x) = 2^(n /
// 16) exp(r), n = 16 k + j and |r| <= ln(2) / 32. The table holds the bits of 2^(j / 16) less j
// 2^19, so that adding n 2^19 adds k to the exponent and takes j out. Within 1 ulp, of which the
// table takes 0.45. Below 2^-126 results fall short, by at most 1.03 2^-127, and at 2^-127 they are
// 0.
TESSERA_TABLE Table kSixteenths = {{1.0f, 0.99088687f, 0.9827539f, 0.9756443f, 0.96960354f,
                                    0.9646789f, 0.9609198f, 0.9583778f, 0.95710677f, 0.9571631f,
                                    0.9586054f, 0.96149516f, 0.9658964f, 0.9718761f, 0.97950405f,
                                    0.9888533f}};
template <class F>
TESSERA_FN F exp_by_table(F x) {
  x = at_least(x, -88.03f);
  const F shift(kShifter), shifted = fma(x, F(23.0831203f), shift), n = shifted - shift;
  const F power = raised(lookup(kSixteenths, shifted), shifted, 19);
  const F r = fma(n, F(1.19040894e-10f), fma(n, F(-0.0433216989f), x));
  F p = fma(r, F(0.166666672f), F(0.500016272f));
  p = fma(p, r, F(1.0f));
  return fma(power, p * r, power);
}
TESSERA_FN double exp_by_table(double x) { return TESSERA_LIBM(exp)(x); }

TESSERA_FN float exp2(float x) {
  x = at_least(at_most(x, 129.0f), -151.0f);
  const float shifted = fma(x, 0.5f, kShifter + 127.0f);
  const float r = fma(shifted - (kShifter + 127.0f), -2.0f, x);  // exact, in [-1, 1]
  const float scale = from_bits(static_cast<int>(static_cast<unsigned>(bits(shifted)) << 23));
  float p = 1.0958106e-6f;
  p = fma(p, r, 1.54373574e-5f);
  p = fma(p, r, 0.000154490655f);
  p = fma(p, r, 0.00133326463f);
  p = fma(p, r, 0.00961785857f);
  p = fma(p, r, 0.0555041134f);
  p = fma(p, r, 0.240226552f);
  p = fma(p, r, 0.693147182f);
  return fma(p, r, 1.0f) * scale * scale;
}
TESSERA_FN double exp2(double x) { return TESSERA_LIBM(exp2)(x); }

// exp(x) - 1 for -18 <= x <= 89: with x = k ln 2 + r it is 2^k (exp(r) - 1) + (2^k - 1), here
// divided by 2 so that k = 128 fits. The sign of a zero is lost.
TESSERA_FN float expm1_core(float x) {
  const float shifted = fma(x, 1.44269502f, kShifter + 126.0f);
  const float k = shifted - (kShifter + 126.0f);
  float r = fma(k, -0.693147182f, x);
  r = fma(k, 1.90465421e-9f, r);
  const float half_scale = from_bits(static_cast<int>(static_cast<unsigned>(bits(shifted)) << 23));
  float p = 0.00138419482f;
  p = fma(p, r, 0.00836769957f);
  p = fma(p, r, 0.0416677147f);
  p = fma(p, r, 0.166665345f);
  p = fma(p, r, 0.49999997f);
  p = fma(p, r * r, r);
  return 2.0f * fma(half_scale, p, half_scale - 0.5f);
}
TESSERA_FN float expm1(float x) {
  const float value = expm1_core(at_least(at_most(x, 89.0f), -18.0f));
  return abs(x) < 1.0e-30f ? x : value;  // halving a denormal would lose its last bit
}
TESSERA_FN double expm1(double x) { return TESSERA_LIBM(expm1)(x); }

// ---- logarithms ----

// log(x) = k ln 2 + (f + tail), with f = m - 1 exact for x = 2^k m and 2/3 <= m < 4/3.
struct LogParts {
  float k, f, tail;
};

// log(1 + f) - f for |f| <= 1/3.
TESSERA_FN float log1p_tail(float f) {
  float p = -0.129507422f;
  p = fma(p, f, 0.139951468f);
  p = fma(p, f, -0.121734373f);
  p = fma(p, f, 0.140044838f);
  p = fma(p, f, -0.166812018f);
  p = fma(p, f, 0.200104758f);
  p = fma(p, f, -0.249997839f);
  p = fma(p, f, 0.333332151f);
  p = fma(p, f, -0.5f);
  return p * (f * f);
}

// The exponent k, as an int, for which 2/3 <= x / 2^k < 4/3; x positive and normal.
TESSERA_FN int log_exponent(float x) {
  return static_cast<int>(static_cast<unsigned>(bits(x)) - 0x3f2aaaabu) >> 23;
}

// x / 2^k through the exponent bits; neither x nor the result may be denormal (zero excepted if k =
// 0).
TESSERA_FN float scale_down(float x, int k) {
  return from_bits(
      static_cast<int>(static_cast<unsigned>(bits(x)) - (static_cast<unsigned>(k) << 23)));
}

// For 0 < x < inf; anything else gives garbage that log_special replaces.
TESSERA_FN LogParts log_parts(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float y = tiny ? x * 8388608.0f : x;
  const int e = log_exponent(y);
  const float f = scale_down(y, e) - 1.0f;
  return {static_cast<float>(e) - (tiny ? 23.0f : 0.0f), f, log1p_tail(f)};
}

// `value` where x is positive and finite, else what every logarithm gives: log 0 = -inf, log(< 0) =
// NaN, inf, NaN.
TESSERA_FN float log_special(float x, float value) {
  const float other = x == 0.0f ? -inf() : nan();
  value = x < inf() ? value : x;
  return x > 0.0f ? value : other;
}

TESSERA_FN float log(float x) {
  const LogParts l = log_parts(x);
  const float value = fma(l.k, 0.693147182f, l.f + fma(l.k, -1.90465421e-9f, l.tail));
  return log_special(x, value);
}
TESSERA_FN double log(double x) { return TESSERA_LIBM(log)(x); }

TESSERA_FN float log2(float x) {
  const LogParts l = log_parts(x);
  const float low = fma(l.f, 1.92596303e-8f, l.tail * 1.44269502f);
  return log_special(x, l.k + fma(l.f, 1.44269502f, low));
}
TESSERA_FN double log2(double x) { return TESSERA_LIBM(log2)(x); }

TESSERA_FN float log10(float x) {
  const LogParts l = log_parts(x);
  const float low = fma(l.f, -1.010305e-8f, fma(l.k, -1.43209888e-8f, l.tail * 0.434294492f));
  return log_special(x, fma(l.k, 0.30103001f, fma(l.f, 0.434294492f, low)));
}
TESSERA_FN double log10(double x) { return TESSERA_LIBM(log10)(x); }

// log(1 + x + low) for -1 < x < 2^120, |low| <= ulp(x); no special values. 1 + x = 2^k m gives k,
// and f = x / 2^k + (2^-k - 1) is rounded once because the quotient is exact.
TESSERA_FN float log1p_core(float x, float low) {
  const int k = log_exponent(1.0f + x);
  const float down = from_bits((127 - k) << 23);
  const float f = scale_down(x, k) + (down - 1.0f);
  const float kf = static_cast<float>(k), tail = fma(low, down, log1p_tail(f));
  return fma(kf, 0.693147182f, f + fma(kf, -1.90465421e-9f, tail));
}
TESSERA_FN float log1p(float x) {
  const bool large = x > 1.0e9f;  // log(x) there, taken of x / 2^23 to stay in range
  const float value =
      log1p_core(large ? x * 1.1920929e-7f - 1.0f : x, 0.0f) + (large ? 15.9423847f : 0.0f);
  const float special = log_special(1.0f + x, value);
  return x == 0.0f ? x : special;
}
TESSERA_FN double log1p(double x) { return TESSERA_LIBM(log1p)(x); }

// ---- hyperbolic functions ----

// 1 - 2 / (exp(2 a) + 1), with a polynomial where that would cancel.
TESSERA_FN float tanh(float x) {
  const float a = at_most(abs(x), 10.0f), z = a * a;
  float p = -0.00624284893f;
  p = fma(p, z, 0.021050714f);
  p = fma(p, z, -0.0538475476f);
  p = fma(p, z, 0.133325443f);
  p = fma(p, z, -0.333333164f);
  const float small = fma(p, z * a, a);
  const float large = 1.0f - 2.0f / (expm1_core(a + a) + 2.0f);
  return copysign(a < 0.55f ? small : large, x);
}
TESSERA_FN double tanh(double x) { return TESSERA_LIBM(tanh)(x); }

// Half of exp(|x|), finite as long as cosh(x) is.
TESSERA_FN float half_exp(float a) {
  const ExpParts e = exp_parts(at_most(a, 90.0f));
  return e.value * e.scale * (0.5f * e.scale);
}

TESSERA_FN float sinh(float x) {
  const float a = abs(x), z = x * x;
  float p = 8.2921503e-11f;
  p = fma(p, z, 2.62453774e-8f);
  p = fma(p, z, 2.749347e-6f);
  p = fma(p, z, 0.00019842785f);
  p = fma(p, z, 0.00833331794f);
  p = fma(p, z, 0.166666672f);
  const float small = fma(p * z, a, a);
  const float h = half_exp(a);
  return copysign(a < 2.2f ? small : h - 0.25f / h, x);
}
TESSERA_FN double sinh(double x) { return TESSERA_LIBM(sinh)(x); }

TESSERA_FN float cosh(float x) {
  const float h = half_exp(abs(x));
  return h + 0.25f / h;
}
TESSERA_FN double cosh(double x) { return TESSERA_LIBM(cosh)(x); }

// log1p(a + t) with t = a^2 / (1 + sqrt(1 + a^2)), which is sqrt(1 + a^2) - 1 without cancellation.
// From 2^13 on it is log(2 a) to within rounding, taken of a / 2^10 to stay in range.
TESSERA_FN float asinh(float x) {
  const float a = abs(x);
  const bool large = a > 8192.0f;
  const float z = a * a, t = z / (1.0f + sqrt(1.0f + z));
  const float u = large ? a * 0.0009765625f - 1.0f : a + t;
  const float value = log1p_core(u, large ? 0.0f : (a - u) + t) + (large ? 7.62461899f : 0.0f);
  return copysign(a < inf() ? value : a, x);
}
TESSERA_FN double asinh(double x) { return TESSERA_LIBM(asinh)(x); }

// log1p(t + sqrt(t (t + 2))) with t = x - 1.
TESSERA_FN float acosh(float x) {
  const bool large = x > 8192.0f;
  const float t = x - 1.0f, s = sqrt(t * (t + 2.0f));
  const float u = large ? x * 0.0009765625f - 1.0f : t + s;
  const float value = log1p_core(u, large ? 0.0f : (s > t ? (s - u) + t : (t - u) + s)) +
                      (large ? 7.62461899f : 0.0f);
  return x >= 1.0f ? (x < inf() ? value : x) : nan();
}
TESSERA_FN double acosh(double x) { return TESSERA_LIBM(acosh)(x); }

// (log1p(a) - log1p(-a)) / 2: both terms have the same sign, nothing cancels.
TESSERA_FN float atanh(float x) {
  const float a = abs(x), b = at_most(a, 0.99999994f);
  const float value = 0.5f * (log1p_core(b, 0.0f) - log1p_core(-b, 0.0f));
  const float edge = a == 1.0f ? inf() : nan();
  return copysign(a < 1.0f ? value : edge, x);
}
TESSERA_FN double atanh(double x) { return TESSERA_LIBM(atanh)(x); }

// ---- powers and roots ----

TESSERA_FN float rsqrt(float x) { return 1.0f / sqrt(x); }
TESSERA_FN double rsqrt(double x) { return 1.0 / sqrt(x); }

// A third of the exponent bits is a first guess within 4 %, Halley's method cubes that error, and a
// step of Newton's with the residual y^3 - x held in two parts squares what is left and removes the
// rounding errors.
TESSERA_FN float cbrt(float x) {
  const float a = abs(x);
  const bool tiny = a < 1.17549435e-38f;
  const float v = tiny ? a * 16777216.0f : a;
  float y = from_bits(static_cast<int>(static_cast<unsigned>(bits(v)) / 3u + 0x2a511000u));
  const float c = y * y * (0.25f * y), w = 0.25f * v;  // quarters, because 2 y^3 + v may overflow
  y = y - y * ((c - w) / (c + c + w));
  const float s = y * y, s_low = fma(y, y, -s);
  const float residual = fma(s_low, y, fma(s, y, -v));
  y = y - residual / (3.0f * s);
  y = tiny ? y * 0.00390625f : y;
  return (a > 0.0f && a < inf()) ? copysign(y, x) : x;
}
TESSERA_FN double cbrt(double x) { return TESSERA_LIBM(cbrt)(x); }

// x^y = 2^(y log2 |x|) in double, where 2^-47 of relative error in the logarithm leaves nothing for
// y log2 |x| < 150. Product and sum are rounded separately so that targets without a double fma
// agree.
TESSERA_FN float pow(float x, float y) {
  const float a = abs(x);
  const bool tiny = a < 1.17549435e-38f;
  const float v = tiny ? a * 8388608.0f : a;
  const int e = log_exponent(v);
  const double m = scale_down(v, e), k = static_cast<float>(e) - (tiny ? 23.0f : 0.0f);
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double p = 0.2511495203696632;
  p = p * z + 0.26065577523186656;
  p = p * z + 0.3206446940707115;
  p = p * z + 0.41219793473043514;
  p = p * z + 0.5770780207170776;
  p = p * z + 0.9617966939149852;
  p = p * z + 2.885390081777931;
  const float edge =
      a > 0.0f ? (a < inf() ? 0.0f : a) : (a == 0.0f ? -inf() : a);  // log2 of 0, inf and NaN
  double w = static_cast<double>(y) * ((k + s * p) + static_cast<double>(edge));
  w = w > 160.0 ? 160.0 : w;
  w = w < -160.0 ? -160.0 : w;
  const double shifter = 6755399441055744.0 + 1023.0;  // 1.5 * 2^52 and the bias, as kShifter above
  const double shifted = w + shifter, r = w - (shifted - shifter);
  double q = 1.3175888469704963e-06;
  q = q * r + 1.530973892757581e-05;
  q = q * r + 0.00015403851619351323;
  q = q * r + 0.0013333452056148473;
  q = q * r + 0.00961812854297684;
  q = q * r + 0.05550410939348544;
  q = q * r + 0.24022650698881046;
  q = q * r + 0.6931471805465121;
  q = q * r + 0.999999999999762;
  const double scale =
      from_bits64(static_cast<long long>(static_cast<unsigned long long>(bits(shifted)) << 52));
  const float magnitude = static_cast<float>(q * scale);
  const float half = 0.5f * y;
  const bool whole = rint(y) == y, odd = whole && rint(half) != half;
  const bool negative = bits(x) < 0;
  float result = odd && negative ? -magnitude : magnitude;
  result = (x < 0.0f && a < inf() && !whole) ? nan() : result;
  result = (x == -1.0f && abs(y) == inf()) ? 1.0f : result;
  return (x == 1.0f || y == 0.0f) ? 1.0f : result;
}
TESSERA_FN double pow(double x, double y) { return TESSERA_LIBM(pow)(x, y); }

}  // namespace tessera::fn
