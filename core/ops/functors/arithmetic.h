// Division, remainders, powers and shifts for floats and integers, with Python's and PyTorch's
// conventions, and what lies between numbers.
// Includes nothing; its includer supplies prelude.h and math.h first.
namespace tessera::fn {

// By its sign bit: GCC takes -fma(a, b, c) for fma(-a, b, -c), which is another zero.
TESSERA_FN float negated(float x) {
  return from_bits(static_cast<int>(static_cast<unsigned>(bits(x)) ^ 0x80000000u));
}
TESSERA_FN double negated(double x) {
  return from_bits64(
      static_cast<long long>(static_cast<unsigned long long>(bits(x)) ^ 0x8000000000000000ull));
}
TESSERA_FN long negated(long x) { return -x; }

TESSERA_FN long abs(long x) { return x < 0 ? -x : x; }
TESSERA_FN long floor(long x) { return x; }
TESSERA_FN long ceil(long x) { return x; }
TESSERA_FN long trunc(long x) { return x; }
TESSERA_FN long rint(long x) { return x; }

TESSERA_FN float fmod(float a, float b) { return TESSERA_LIBM(fmodf)(a, b); }
TESSERA_FN double fmod(double a, double b) { return TESSERA_LIBM(fmod)(a, b); }
/// b is not 0, which the caller has checked; b = -1 is answered without dividing, for the lowest a
/// overflows.
TESSERA_FN long fmod(long a, long b) { return b == -1 ? 0 : a % b; }

/// a - b * floor(a / b): has the sign of b.
template <class T>
TESSERA_FN T remainder(T a, T b) {
  T r = fmod(a, b);
  return r != T(0) && (r < T(0)) != (b < T(0)) ? r + b : r;
}

/// floor(a / b), from the exact remainder so that it agrees with remainder().
template <class T>
TESSERA_FN T floor_divide(T a, T b) {
  if constexpr (T(1) / T(2) == T(0)) {
    if (b == -1) return T(0UL - (unsigned long)(a));
    T q = a / b;
    return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
  } else {
    T r = fmod(a, b), q = (a - r) / b;
    q = r != T(0) && (r < T(0)) != (b < T(0)) ? q - T(1) : q;
    T f = floor(q);
    f = q - f > T(0.5) ? f + T(1) : f;
    return b == T(0) ? a / b : q == T(0) ? copysign(T(0), a / b) : f;
  }
}

/// Square-and-multiply, wrapping; a negative exponent gives 0 except for bases 1 and -1.
TESSERA_FN long pow(long base, long exponent) {
  unsigned long result = 1, b = (unsigned long)(base), e = (unsigned long)(exponent);
  for (; exponent > 0 && e; e >>= 1, b *= b)
    if (e & 1) result *= b;
  if (exponent < 0) result = base == 1 ? 1UL : base == -1 ? (e & 1 ? ~0UL : 1UL) : 0UL;
  return long(result);
}

/// All bits leave beyond the width of the type.
template <class T>
TESSERA_FN T shift_left(T a, T b) {
  return (unsigned long)(b) < sizeof(T) * 8 ? T((unsigned long)(a) << (b & 63)) : T(0);
}
/// The sign stays.
template <class T>
TESSERA_FN T shift_right(T a, T b) {
  return a >> ((unsigned long)(b) < sizeof(T) * 8 ? b : T(sizeof(T) * 8 - (T(-1) < T(0))));
}

template <class T>
TESSERA_FN T clamp(T x, T low, T high) {
  T y = x < low ? low : x;
  return y > high ? high : y;
}
/// a + w (b - a), exactly b where w is 1.
template <class T>
TESSERA_FN T lerp(T a, T b, T w) {
  return w < T(0.5) ? a + w * (b - a) : b - (b - a) * (T(1) - w);
}

}  // namespace tessera::fn
