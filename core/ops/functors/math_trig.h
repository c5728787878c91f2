// Circular functions and their inverses, in the manner of math.h (include prelude.h and math.h
// first). Invariant: float results are within 2 ulp for every finite argument, however large:
// arguments up to 2^16 are reduced in float, larger ones exactly in double, both without a branch
// in vector code.
#pragma once

namespace tessera::fn {

// |x| = quadrant * pi/2 + r + low, |r| <= pi/4 (a little more in the last place); only quadrant mod
// 4 is kept.
struct QuarterTurns {
  float r, low;
  int quadrant;
};

// p - 4 round(p / 4): a multiple of 4 quarter turns is nothing. Exact.
TESSERA_FN double drop_turns(double p) { return p - 4.0 * rint(0.25 * p); }

// Quarter turns in a, to 2^-58 for 2^16 <= a < inf: 2/pi cut into pieces of 29 bits makes all
// products exact, and whole turns are dropped from each before they are added, the idea of Payne
// and Hanek 1983, "Radian reduction for trigonometric functions". The pieces left overlap by less
// than double's precision. The result lies in (-14, 14).
TESSERA_FN void large_turns(double a, double& whole, double& rest) {
  const double t0 = drop_turns(a * 0x1.45f306dp-1), t1 = drop_turns(a * 0x1.9391054p-30);
  const double t2 = drop_turns(a * 0x1.4fe13abp-59), t3 = drop_turns(a * 0x1.d1f534dp-88);
  const double t4 = drop_turns(a * 0x1.b81b6c5p-117), t5 = drop_turns(a * 0x1.5993c4p-148);
  const double t6 = drop_turns(a * 0x1.c820ffp-175);
  whole = rint(t0 + (t1 + (t2 + (t3 + (t4 + (t5 + t6))))));
  rest = ((((((t0 - whole) + t1) + t2) + t3) + t4) + t5) + t6;
}

TESSERA_FN QuarterTurns quarter_turns(float x) {
  const float a = abs(x);
  float shifted = fma(a, 0.636619747f, kShifter);
  const float k = shifted - kShifter;
  // Cody and Waite with pi/2 in three parts; the first difference is exact, the second product and
  // sum are kept with their errors.
  const float r1 = fma(k, -1.57079637f, a);
  const float t = k * 4.37113883e-8f, t_low = fma(k, 4.37113883e-8f, -t);
  const float r2 = r1 + t, back = r2 - r1, r2_low = (r1 - (r2 - back)) + (t - back);
  const float e = fma(k, 1.71512451e-15f, t_low) + r2_low;
  float r = r2 + e, low = (r2 - r) + e;
  const bool large = a > 65536.0f;
  if (rare(large)) {
    double whole, rest;
    large_turns(a, whole, rest);
    rest *= 1.5707963267948966;
    const float high = static_cast<float>(rest);
    shifted = large ? static_cast<float>(whole) + kShifter : shifted;
    low = large ? static_cast<float>(rest - high) : low;
    r = large ? high : r;
  }
  return {r, low, bits(shifted)};
}

// sin(r + low) and cos(r + low) for |r| <= pi/4.
TESSERA_FN float sin_core(float r, float low) {
  const float z = r * r;
  float p = -0.000195180939f;
  p = fma(p, z, 0.00833218824f);
  p = fma(p, z, -0.166666552f);
  return r + fma(p, z * r, low);
}
TESSERA_FN float cos_core(float r, float low) {
  const float z = r * r, h = 0.5f * z, w = 1.0f - h;
  float p = 2.44323273e-5f;
  p = fma(p, z, -0.00138873095f);
  p = fma(p, z, 0.0416666456f);
  return w + (((1.0f - w) - h) + fma(p, z * z, -(r * low)));
}

TESSERA_FN float flip_sign(float x, unsigned sign_bit) {
  return from_bits(static_cast<int>(static_cast<unsigned>(bits(x)) ^ sign_bit));
}

TESSERA_FN float sin(float x) {
  const QuarterTurns t = quarter_turns(x);
  const float s = sin_core(t.r, t.low), c = cos_core(t.r, t.low);
  const unsigned q = static_cast<unsigned>(t.quadrant);
  return flip_sign((q & 1u) != 0 ? c : s, (q << 30 ^ static_cast<unsigned>(bits(x))) & 0x80000000u);
}
TESSERA_FN double sin(double x) { return TESSERA_LIBM(sin)(x); }

TESSERA_FN float cos(float x) {
  const QuarterTurns t = quarter_turns(x);
  const float s = sin_core(t.r, t.low), c = cos_core(t.r, t.low);
  const unsigned q = static_cast<unsigned>(t.quadrant);
  return flip_sign((q & 1u) != 0 ? s : c, ((q + 1u) << 30) & 0x80000000u);
}
TESSERA_FN double cos(double x) { return TESSERA_LIBM(cos)(x); }

TESSERA_FN float tan(float x) {
  const QuarterTurns t = quarter_turns(x);
  const float z = t.r * t.r;
  float p = 0.00437645847f;
  p = fma(p, z, 9.1180038e-5f);
  p = fma(p, z, 0.0108324951f);
  p = fma(p, z, 0.0212845095f);
  p = fma(p, z, 0.0540591776f);
  p = fma(p, z, 0.133326739f);
  p = fma(p, z, 0.333333492f);
  // tan(r + low) = v + v_low; its derivative is 1 + tan^2.
  const float tail = fma(p, z * t.r, fma(t.low, z, t.low)), v = t.r + tail,
              v_low = (t.r - v) + tail;
  // -1 / (v + v_low) = q + q (1 + q v + q v_low), one Newton step.
  const float q = -1.0f / v, cot = fma(q, fma(q, v_low, fma(q, v, 1.0f)), q);
  const bool odd = (t.quadrant & 1) != 0;
  return flip_sign(odd ? cot : v, static_cast<unsigned>(bits(x)) & 0x80000000u);
}
TESSERA_FN double tan(double x) { return TESSERA_LIBM(tan)(x); }

// asin(s) - s for s = sqrt(z), 0 <= z <= 1/4.
TESSERA_FN float asin_tail(float s, float z) {
  float p = 0.0421582311f;
  p = fma(p, z, 0.0241848119f);
  p = fma(p, z, 0.0454691462f);
  p = fma(p, z, 0.0749530941f);
  p = fma(p, z, 0.166667521f);
  return p * (z * s);
}

// Above 1/2 through asin(a) = pi/2 - 2 asin(sqrt((1 - a) / 2)).
TESSERA_FN float asin(float x) {
  const float a = abs(x);
  const bool upper = a > 0.5f;
  const float z = upper ? fma(-0.5f, a, 0.5f) : a * a;
  const float s = upper ? sqrt(z) : a, tail = asin_tail(s, z);
  return copysign(upper ? (1.57079637f - 2.0f * s) - fma(2.0f, tail, 4.37113883e-8f) : s + tail, x);
}
TESSERA_FN double asin(double x) { return TESSERA_LIBM(asin)(x); }

TESSERA_FN float acos(float x) {
  const float a = abs(x);
  const bool upper = a > 0.5f;
  const float z = upper ? fma(-0.5f, a, 0.5f) : a * a;
  const float s = upper ? sqrt(z) : a, v = copysign(s + asin_tail(s, z), x);
  const float outer = x > 0.0f ? 2.0f * v : 3.14159274f + fma(2.0f, v, -8.74227766e-8f);
  return upper ? outer : 1.57079637f - (v + 4.37113883e-8f);
}
TESSERA_FN double acos(double x) { return TESSERA_LIBM(acos)(x); }

// atan(t) for 0 <= t <= 1.
TESSERA_FN float atan_core(float t) {
  const float z = t * t;
  float p = -0.00178896217f;
  p = fma(p, z, 0.0108928103f);
  p = fma(p, z, -0.0311352462f);
  p = fma(p, z, 0.0579125956f);
  p = fma(p, z, -0.0840067863f);
  p = fma(p, z, 0.109511867f);
  p = fma(p, z, -0.142640427f);
  p = fma(p, z, 0.199985296f);
  p = fma(p, z, -0.333332986f);
  return fma(p, z * t, t);
}

TESSERA_FN float atan(float x) {
  const float a = abs(x);
  const bool steep = a > 1.0f;
  const float v = atan_core((steep ? 1.0f : a) / (steep ? a : 1.0f));
  return copysign(steep ? 1.57079637f - (v + 4.37113883e-8f) : v, x);
}
TESSERA_FN double atan(double x) { return TESSERA_LIBM(atan)(x); }

// The angle of (x, y): atan of the smaller over the larger, then base + or - that, base one of 0,
// pi/2, pi.
TESSERA_FN float atan2(float y, float x) {
  const float ax = abs(x), ay = abs(y);
  const bool steep = ay > ax, left = bits(x) < 0;
  const float low = steep ? ax : ay, high = steep ? ay : ax;
  const float ratio =
      low == high ? (high > 0.0f ? 1.0f : 0.0f) : low / high;  // also inf/inf and 0/0
  const float v = atan_core(ratio), signed_v = steep != left ? -v : v;
  const float base = steep ? 1.57079637f : (left ? 3.14159274f : 0.0f);
  const float base_low = steep ? -4.37113883e-8f : (left ? -8.74227766e-8f : 0.0f);
  const float angle = copysign(base + (signed_v + base_low), y);
  return (x != x || y != y) ? x + y : angle;
}
TESSERA_FN double atan2(double y, double x) { return TESSERA_LIBM(atan2)(y, x); }

}  // namespace tessera::fn
