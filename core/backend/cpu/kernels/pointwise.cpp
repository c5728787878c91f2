// Loops of every pointwise functor for f32, f64 and i64. Contiguous rows, and rows with scalar
// operands, get loops of their own that vectorise; anything else takes the strided loop.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/tables.h"
// Each text needs the one before it.
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/group.h"
#include "core/ops/functors/math.h"
#include "core/ops/functors/math_trig.h"
#include "core/ops/functors/pieces.h"
#include "core/ops/functors/activations.h"
#include "core/ops/functors/special.h"
#include "core/ops/functors/arithmetic.h"
#include "core/ops/functors/pointwise.h"
// clang-format on
#include "core/ops/pointwise_columns.h"

namespace tessera::cpu {
namespace {

using namespace columns;

template <class T>
T load(const char* p) {
  return *reinterpret_cast<const T*>(p);
}

// What a loop goes through in groups of floats; the rest is left to a loop of its own. Four
// vectors, because a lookup and the steps of a polynomial wait for each other.
constexpr int64_t kGroup = 4 * fn::kFloats;
template <bool grouped, class Loads>
int64_t in_groups(float* r, int64_t n, Loads apply) {
  int64_t i = 0;
  if constexpr (grouped)
    for (; i + kGroup <= n; i += kGroup) fn::store(r + i, apply(i));
  return i;
}
template <bool grouped, class R, class Loads>
int64_t in_groups(R*, int64_t, Loads) {
  return 0;
}
fn::Group<kGroup> group(const float* p) { return fn::load<kGroup>(p); }

template <class F, class T, bool grouped>
void unary(char* const* p, const int64_t* s, int64_t n) {
  using R = decltype(F::apply(T()));
  if (s[0] == int64_t(sizeof(R)) && s[1] == int64_t(sizeof(T))) {
    R* r = reinterpret_cast<R*>(p[0]);
    const T* a = reinterpret_cast<const T*>(p[1]);
    int64_t i = in_groups<grouped>(r, n, [&](auto k) { return F::apply(group(a + k)); });
#pragma GCC ivdep
    for (; i < n; ++i) r[i] = F::apply(a[i]);
    return;
  }
  for (int64_t i = 0; i < n; ++i)
    *reinterpret_cast<R*>(p[0] + i * s[0]) = F::apply(load<T>(p[1] + i * s[1]));
}

template <class F, class T, bool grouped>
void binary(char* const* p, const int64_t* s, int64_t n) {
  using R = decltype(F::apply(T(), T()));
  constexpr int64_t kT = sizeof(T);
  if (s[0] == int64_t(sizeof(R)) && (s[1] == kT || s[1] == 0) && (s[2] == kT || s[2] == 0) &&
      n > 1) {
    R* r = reinterpret_cast<R*>(p[0]);
    const T *a = reinterpret_cast<const T*>(p[1]), *b = reinterpret_cast<const T*>(p[2]);
    if (s[1] && s[2]) {
      int64_t i =
          in_groups<grouped>(r, n, [&](auto k) { return F::apply(group(a + k), group(b + k)); });
#pragma GCC ivdep
      for (; i < n; ++i) r[i] = F::apply(a[i], b[i]);
    } else if (s[1]) {
      const T c = *b;
      if (__is_same(F, functors::mul) && c == T(1) && static_cast<const void*>(r) == a)
        return;  // in place
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) r[i] = F::apply(a[i], c);
    } else if (s[2]) {
      const T c = *a;
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) r[i] = F::apply(c, b[i]);
    } else {
      const R c = F::apply(*a, *b);
      for (int64_t i = 0; i < n; ++i) r[i] = c;
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i)
    *reinterpret_cast<R*>(p[0] + i * s[0]) =
        F::apply(load<T>(p[1] + i * s[1]), load<T>(p[2] + i * s[2]));
}

template <class F, class T>
void ternary(char* const* p, const int64_t* s, int64_t n) {
  constexpr int64_t kT = sizeof(T);
  if (s[0] == kT && s[1] == kT && s[2] == 0 && s[3] == 0) {
    T* r = reinterpret_cast<T*>(p[0]);
    const T* a = reinterpret_cast<const T*>(p[1]);
    const T b = load<T>(p[2]), c = load<T>(p[3]);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) r[i] = F::apply(a[i], b, c);
    return;
  }
  for (int64_t i = 0; i < n; ++i)
    *reinterpret_cast<T*>(p[0] + i * s[0]) =
        F::apply(load<T>(p[1] + i * s[1]), load<T>(p[2] + i * s[2]), load<T>(p[3] + i * s[3]));
}

// Brain floats are computed by twos, so that nothing is shuffled: each word holds one in its upper
// half and one in its lower. Rounds to nearest even; NaN stays NaN.
inline float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t rounded(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  return x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
}
template <class F>
void binary_bf16(char* const* p, const int64_t*, int64_t n) {
  auto at = [](uint32_t a, uint32_t b) {
    return rounded(F::apply(as_float(a << 16), as_float(b << 16))) >> 16 |
           (rounded(F::apply(as_float(a & 0xffff0000), as_float(b & 0xffff0000))) & 0xffff0000);
  };
  typedef uint32_t Word __attribute__((aligned(2), may_alias));
  Word* r = reinterpret_cast<Word*>(p[0]);  // no auto, which drops attributes of a type
  const Word *a = reinterpret_cast<const Word*>(p[1]), *b = reinterpret_cast<const Word*>(p[2]);
  const int64_t words = n / 2;
#pragma GCC ivdep
  for (int64_t i = 0; i < words; ++i) r[i] = at(a[i], b[i]);
  if (n % 2 == 0) return;
  const int64_t last = (n - 1) * 2;
  const uint32_t word = at(load<uint16_t>(p[1] + last), load<uint16_t>(p[2] + last));
  *reinterpret_cast<uint16_t*>(p[0] + last) = uint16_t(word);
}

// The loop of F for elements of T; null where ops of this kind have no such operands.
template <class F, Kind kind, unsigned facts, int operands, class T>
constexpr Loop loop() {
  constexpr bool grouped = (facts & kInGroups) != 0;
  if constexpr (__is_same(T, int64_t) ? kind == kFloat : kind == kBits)
    return nullptr;
  else if constexpr (operands == 1)
    return unary<F, T, grouped>;
  else if constexpr (operands == 2)
    return binary<F, T, grouped>;
  else
    return ternary<F, T>;
}
template <class F, Kind kind, unsigned facts, int operands>
constexpr PointwiseLoops loops(const char* name) {
  return {name,
          operands,
          kind == kTest,
          loop<F, kind, facts, operands, float>(),
          loop<F, kind, facts, operands, double>(),
          loop<F, kind, facts, operands, int64_t>(),
          __is_same(F, functors::add) ? binary_bf16<functors::add> : nullptr};
}

constexpr PointwiseLoops kRows[] = {
#define TESSERA_OP1(name, kernel, kind, precision, cost, facts, ...) \
  loops<functors::name, kind, unsigned{facts}, 1>(#name),
#define TESSERA_OP2(name, kernel, kind, precision, cost, facts, ...) \
  loops<functors::name, kind, unsigned{facts}, 2>(#name),
#define TESSERA_OP3(name, kernel, kind, precision, cost, facts, ...) \
  loops<functors::name, kind, unsigned{facts}, 3>(#name),
#include "core/ops/pointwise.def"
};

}  // namespace

template <>
const PointwiseTable& isa_table<PointwiseTable, isa::TESSERA_ISA>() {
  static const PointwiseTable table{kRows, sizeof(kRows) / sizeof(*kRows)};
  return table;
}

}  // namespace tessera::cpu
