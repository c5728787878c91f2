// The gamma family and the inverse of erf (include prelude.h and math.h first). A float result is
// the double one rounded once: these functions are rare in a step, and in double their recurrences
// and reflections need no care. Bounds, double: trigamma and erfinv 4 ulp, digamma 4 ulp or, near
// its zeros, 2^-48 absolutely; lgamma is libm's.
#pragma once

namespace tessera::fn {

constexpr double kPi = 3.141592653589793;

#if defined(__has_builtin) && !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#if __has_builtin(__builtin_lgamma_r)
#define TESSERA_HAS_LGAMMA_R
#endif
#endif
TESSERA_FN double lgamma(double x) {
#if defined(TESSERA_HAS_LGAMMA_R)  // plain lgamma leaves the sign in a global that threads share
  int sign;
  return __builtin_lgamma_r(x, &sign);
#else
  return TESSERA_LIBM(lgamma)(x);
#endif
}
TESSERA_FN float lgamma(float x) { return static_cast<float>(lgamma(static_cast<double>(x))); }

// psi(x) = psi(x + n) - sum 1 / (x + k) brings x to 10, where the asymptotic series (Abramowitz,
// Stegun 6.3.18) has converged; psi(1 - x) - psi(x) = pi / tan(pi x) reflects negative x.
TESSERA_FN double digamma(double x) {
  double y = x < 0.0 ? 1.0 - x : x, sum = 0.0;
  for (int i = 0; i < 10; ++i) {
    const bool small = y < 10.0;
    sum += small ? 1.0 / y : 0.0;
    y += small ? 1.0 : 0.0;
  }
  const double z = 1.0 / (y * y);
  double p = 1.0 / 12.0;
  p = p * z - 691.0 / 32760.0;
  p = p * z + 1.0 / 132.0;
  p = p * z - 1.0 / 240.0;
  p = p * z + 1.0 / 252.0;
  p = p * z - 1.0 / 120.0;
  p = p * z + 1.0 / 12.0;
  const double right = TESSERA_LIBM(log)(y) - 0.5 / y - z * p - sum;
  const double r = x - rint(x), left = right - kPi / TESSERA_LIBM(tan)(kPi * r);
  const double value = x < 0.0 ? (r == 0.0 ? static_cast<double>(nan()) : left) : right;
  return x == 0.0 ? copysign(static_cast<double>(inf()), -x) : value;
}
TESSERA_FN float digamma(float x) { return static_cast<float>(digamma(static_cast<double>(x))); }

// The derivative of digamma, in the same way; psi1(1 - x) + psi1(x) = (pi / sin(pi x))^2.
TESSERA_FN double trigamma(double x) {
  double y = x < 0.5 ? 1.0 - x : x, sum = 0.0;
  for (int i = 0; i < 10; ++i) {
    const bool small = y < 10.0;
    sum += small ? 1.0 / (y * y) : 0.0;
    y += small ? 1.0 : 0.0;
  }
  const double z = 1.0 / (y * y);
  double p = 7.0 / 6.0;
  p = p * z - 691.0 / 2730.0;
  p = p * z + 5.0 / 66.0;
  p = p * z - 1.0 / 30.0;
  p = p * z + 1.0 / 42.0;
  p = p * z - 1.0 / 30.0;
  p = p * z + 1.0 / 6.0;
  const double right = 1.0 / y + 0.5 * z + z / y * p + sum;
  const double q = kPi / TESSERA_LIBM(sin)(kPi * (x - rint(x)));
  return x < 0.5 ? q * q - right : right;
}
TESSERA_FN float trigamma(float x) { return static_cast<float>(trigamma(static_cast<double>(x))); }

// The quantile of the normal distribution at (1 + x) / 2, divided by sqrt 2: rational functions of
// x^2 in the middle and of sqrt(-log of the tail) outside. Wichura 1988, "Algorithm AS 241: The
// Percentage Points of the Normal Distribution", PPND16.
TESSERA_FN double erfinv(double x) {
  const double a = abs(x);
  double r = 0.180625 - 0.25 * a * a, num, den;
  num = 2.5090809287301226727e+3, den = 5.2264952788528545610e+3;
  num = num * r + 3.3430575583588128105e+4, den = den * r + 2.8729085735721942674e+4;
  num = num * r + 6.7265770927008700853e+4, den = den * r + 3.9307895800092710610e+4;
  num = num * r + 4.5921953931549871457e+4, den = den * r + 2.1213794301586595867e+4;
  num = num * r + 1.3731693765509461125e+4, den = den * r + 5.3941960214247511077e+3;
  num = num * r + 1.9715909503065514427e+3, den = den * r + 6.8718700749205790830e+2;
  num = num * r + 1.3314166789178437745e+2, den = den * r + 4.2313330701600911252e+1;
  num = num * r + 3.3871328727963666080e+0, den = den * r + 1.0;
  const double middle = 0.5 * a * (num / den);
  const double root = sqrt(-TESSERA_LIBM(log)(0.5 * (1.0 - a)));
  r = root - 1.6;
  num = 7.74545014278341407640e-4, den = 1.05075007164441684324e-9;
  num = num * r + 2.27238449892691845833e-2, den = den * r + 5.47593808499534494600e-4;
  num = num * r + 2.41780725177450611770e-1, den = den * r + 1.51986665636164571966e-2;
  num = num * r + 1.27045825245236838258e+0, den = den * r + 1.48103976427480074590e-1;
  num = num * r + 3.64784832476320460504e+0, den = den * r + 6.89767334985100004550e-1;
  num = num * r + 5.76949722146069140550e+0, den = den * r + 1.67638483018380384940e+0;
  num = num * r + 4.63033784615654529590e+0, den = den * r + 2.05319162663775882187e+0;
  num = num * r + 1.42343711074968357734e+0, den = den * r + 1.0;
  const double outer = num / den;
  r = root - 5.0;
  num = 2.01033439929228813265e-7, den = 2.04426310338993978564e-15;
  num = num * r + 2.71155556874348757815e-5, den = den * r + 1.42151175831644588870e-7;
  num = num * r + 1.24266094738807843860e-3, den = den * r + 1.84631831751005468180e-5;
  num = num * r + 2.65321895265761230930e-2, den = den * r + 7.86869131145613259100e-4;
  num = num * r + 2.96560571828504891230e-1, den = den * r + 1.48753612908506148525e-2;
  num = num * r + 1.78482653991729133580e+0, den = den * r + 1.36929880922735805310e-1;
  num = num * r + 5.46378491116411436990e+0, den = den * r + 5.99832206555887937690e-1;
  num = num * r + 6.65790464350110377720e+0, den = den * r + 1.0;
  const double tail = num / den;
  const double value = (a <= 0.85 ? middle : root <= 5.0 ? outer : tail) * 0.7071067811865476;
  const double edge = static_cast<double>(a == 1.0 ? inf() : nan());
  return copysign(a < 1.0 ? value : edge, x);
}
TESSERA_FN float erfinv(float x) { return static_cast<float>(erfinv(static_cast<double>(x))); }

}  // namespace tessera::fn
