// The operators of reductions: each has a start value and a function that joins two values. The
// CPU's generated kernels and all kernels of cards use this text. Include prelude.h first.
// Invariant: joins commute, but for the sign of a zero and the bits of a NaN in Max and Min.
namespace tessera::fn {

struct Sum {
  template <class T>
  TESSERA_FN T start() {
    return T(0);
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return a + b;
  }
};
struct Prod {
  template <class T>
  TESSERA_FN T start() {
    return T(1);
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return a * b;
  }
};
/// A NaN operand makes the result NaN, here and in Min. `prefer` is one instruction that keeps `a`
/// where `b` is NaN.
struct Max {
  template <class T>
  TESSERA_FN T prefer(T a, T b) {
    return b > a ? b : a;
  }
  template <class T>
  TESSERA_FN T start() {
    return sizeof(T) == 1 ? T(0) : T(0.5) != T(0) ? T(-inf()) : T(1L << 63);
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return (a > b) | (a != a) ? a : b;
  }
};
struct Min {
  template <class T>
  TESSERA_FN T prefer(T a, T b) {
    return b < a ? b : a;
  }
  template <class T>
  TESSERA_FN T start() {
    return sizeof(T) == 1 ? T(1) : T(0.5) != T(0) ? T(inf()) : T(~(1L << 63));
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return (a < b) | (a != a) ? a : b;
  }
};
struct Any {
  template <class T>
  TESSERA_FN T start() {
    return false;
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return a | b;
  }
};
struct All {
  template <class T>
  TESSERA_FN T start() {
    return true;
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return a & b;
  }
};

}  // namespace tessera::fn
