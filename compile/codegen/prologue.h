// The run-time library of generated kernels, besides the functors: rounding to narrow dtypes, and,
// on CPUs, reductions in interleaved lanes that are combined in a balanced tree, so that the order
// of a sum is a property of the text and not of the vector width. It is printed in front of the
// kernels of a file, after the functors. Like those, it includes nothing.
namespace tessera::generated {

using namespace fn;

TESSERA_FN float as_bf16(float x) { return widen(to_bf16(x)); }
TESSERA_FN float as_f16(float x) { return widen(to_f16(x)); }
TESSERA_FN float as_f8e4m3(float x) { return widen(to_f8e4m3(x)); }
TESSERA_FN float as_f8e5m2(float x) { return widen(to_f8e5m2(x)); }
TESSERA_FN long as_i32(long x) { return static_cast<int>(x); }
TESSERA_FN long as_u8(long x) { return static_cast<unsigned char>(x); }
/// Integers have no -0, but GCC 12 turns float(long(x)) into trunc(x), which keeps the sign of
/// -0.5. Adding 0 drops that sign, and the barrier keeps GCC from removing the sum.
template <class T>
TESSERA_FN T unsigned_zero(T x) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(x) + T(0);
#endif
#endif
  return x;
}
/// `x` as a position in [0, extent), or -1.
TESSERA_FN int position(long x, long extent) {
  return x >= 0 && x < extent ? static_cast<int>(x) : -1;
}

#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)

#define TESSERA_MEMBER inline __attribute__((always_inline))

template <class Op, class T>
TESSERA_FN void start(T* to, long n) {
  for (long i = 0; i < n; ++i) to[i] = Op::template start<T>();
}
/// The type that lanes of T are stored in, since there are no vectors of bool.
template <class T>
struct Lane {
  using Type = T;
};
template <>
struct Lane<bool> {
  using Type = unsigned char;
};
template <class Op>
inline constexpr bool kPicks = false;
template <>
inline constexpr bool kPicks<Max> = true;
template <>
inline constexpr bool kPicks<Min> = true;
/// Maxima and minima that may ignore NaN: no operand is NaN, or the result does not matter if one
/// is.
template <class Op>
struct Numbers : Op {
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return Op::prefer(b, a);
  }
};
/// A vector of N elements, or of as many as fit into 64 bytes.
template <class T, long N>
struct Wide {
  static constexpr long kWidth = N < 64 / long(sizeof(T)) ? N : 64 / long(sizeof(T));
  static constexpr long kCount = N / kWidth;
  typedef T Vector __attribute__((vector_size(kWidth * sizeof(T)), aligned(alignof(T)), may_alias));
};
/// Reduces L lanes to one value: lane i is joined with lane i + L / 2, and so on.
template <class Op, long L, class T>
TESSERA_FN T fold(T* lane) {
  if constexpr (L == 1) {
    return lane[0];
  } else {
    using W = Wide<T, L / 2>;
    auto* v = reinterpret_cast<typename W::Vector*>(lane);
    for (long k = 0; k < W::kCount; ++k) v[k] = Op::join(v[k], v[k + W::kCount]);
    return fold<Op, L / 2>(lane);
  }
}
/// The terms that a step of a loop leaves in each of L lanes. They live for one step, in registers.
template <class T, long L>
struct Terms {
  alignas(64) T of[L];
  TESSERA_MEMBER Terms() {}
};
/// Running totals of the terms of each step, in L interleaved lanes. A maximum of floats is taken
/// as if there were no NaN, and whether there was one is recorded beside it: the next element then
/// waits for one instruction instead of three.
template <class Op, class Element, long L>
struct Lanes {
  using T = typename Lane<Element>::Type;
  using W = Wide<T, L>;
  using Vector = typename W::Vector;
  using Step = Terms<T, L>;
  Vector total[W::kCount];
  static constexpr bool kMayBeNan = kPicks<Op> && T(0.5) != T(0);
  decltype(Vector{} != Vector{}) nan[W::kCount] = {};
  typedef __typeof__((Vector{} != Vector{})[0]) NanLane __attribute__((may_alias));

  TESSERA_MEMBER Lanes() {
    Step step;
    clear(step);
    for (long k = 0; k < W::kCount; ++k) total[k] = terms(step)[k];
  }
  static TESSERA_MEMBER Vector* terms(Step& step) { return reinterpret_cast<Vector*>(step.of); }
  /// Fills `step` with terms that leave the totals unchanged.
  TESSERA_MEMBER void clear(Step& step) {
    for (long l = 0; l < L; ++l) step.of[l] = Op::template start<Element>();
  }
  TESSERA_MEMBER void take(long, Step& step) {
    for (long k = 0; k < W::kCount; ++k) {
      const Vector t = terms(step)[k];
      if constexpr (kMayBeNan)
        total[k] = Op::prefer(total[k], t), nan[k] |= t != t;
      else
        total[k] = Op::join(total[k], t);
    }
  }
  TESSERA_MEMBER void take(long i, long, Step& step) { take(i, step); }
  TESSERA_MEMBER Element folded() {
    Step step;
    for (long k = 0; k < W::kCount; ++k) terms(step)[k] = total[k];
    if constexpr (kMayBeNan) {
      alignas(64) decltype(Vector{} != Vector{}) any[W::kCount];
      for (long k = 0; k < W::kCount; ++k) any[k] = nan[k];
      const T number = fold<Numbers<Op>, L>(step.of);
      return fold<Any, L>(reinterpret_cast<NanLane*>(any)) ? T(fn::nan()) : number;
    } else {
      return fold<Op, L>(step.of);
    }
  }
};

#if defined(__AVX512F__)
constexpr long kStoreBytes = 64;
#elif defined(__AVX__)
constexpr long kStoreBytes = 32;
#else
constexpr long kStoreBytes = 16;
#endif
typedef float Piece __attribute__((vector_size(kStoreBytes), may_alias));
typedef float LoosePiece __attribute__((vector_size(kStoreBytes), aligned(1), may_alias));
/// Stores to memory past the caches, where the target can.
TESSERA_FN void stream(char* to, Piece piece) {
#if defined(__clang__)
  __builtin_nontemporal_store(piece, reinterpret_cast<Piece*>(to));
#elif defined(__AVX512F__)
  __builtin_ia32_movntps512(reinterpret_cast<float*>(to), piece);
#elif defined(__AVX__)
  __builtin_ia32_movntps256(reinterpret_cast<float*>(to), piece);
#elif defined(__SSE__)
  __builtin_ia32_movntps(reinterpret_cast<float*>(to), piece);
#else
  *reinterpret_cast<Piece*>(to) = piece;
#endif
}
/// Must be called before another thread is told that streamed results are there.
TESSERA_FN void finish_streams() {
#if defined(__SSE__)
  __builtin_ia32_sfence();
#endif
}
/// Stores elements of the result at `to` past the caches, L at a time, in whole cache lines. Stores
/// are ordinary where streaming is not wanted, where the elements do not begin at a line, and for
/// fewer than L of them.
template <class T, long L>
struct Streamed {
  T* to = nullptr;
  bool wanted = false;
  using Step = Terms<T, L>;
  static constexpr long kLine = 64;
  static_assert(sizeof(Step) % kLine == 0);

  TESSERA_MEMBER void clear(Step&) {}
  TESSERA_MEMBER long past_line(long i) const {
    return static_cast<long>(reinterpret_cast<unsigned long>(to + i) % kLine);
  }
  /// The number of elements from i on before the next line begins.
  TESSERA_MEMBER long before_line(long i) const {
    return (kLine - past_line(i)) % kLine / static_cast<long>(sizeof(T));
  }
  TESSERA_MEMBER void take(long i, const Step& step) {
    const Piece* piece = reinterpret_cast<const Piece*>(step.of);
    char* at = reinterpret_cast<char*>(to + i);
    const bool whole_lines = wanted && past_line(i) == 0;
    for (long k = 0; k < long(sizeof(Step)) / kStoreBytes; ++k)
      if (whole_lines)
        stream(at + k * kStoreBytes, piece[k]);
      else
        *reinterpret_cast<LoosePiece*>(at + k * kStoreBytes) = piece[k];
  }
  TESSERA_MEMBER void take(long i, long n, const Step& step) {
    for (long l = 0; l < n; ++l) to[i + l] = step.of[l];
  }
};
/// Prefetches the elements of an operand that will be read later into the cache of that level, L at
/// a time.
template <class T, long L, int kLevel>
struct Ahead {
  const T* next = nullptr;
  struct Step {
    int of;
  };
  TESSERA_MEMBER void clear(Step&) {}
  TESSERA_MEMBER void take(long i, Step&) {
    for (long k = 0; k < L; k += 64 / long(sizeof(T)))
      __builtin_prefetch(next + i + k, 0, 4 - kLevel);
  }
  TESSERA_MEMBER void take(long, long, Step&) {}
};
/// A body that compares its index with some numbers. Each step tells it whether the step may
/// contain one of them.
template <class F, long N>
struct Asking {
  F body;
  int numbers[N];
};
template <class F, class... T>
TESSERA_FN Asking<F, sizeof...(T)> asking(F body, T... numbers) {
  return {body, {numbers...}};
}
template <class F>
TESSERA_FN bool asks(const F&, long, long) {
  return false;
}
template <class F, long N>
TESSERA_FN bool asks(const Asking<F, N>& of, long i, long n) {
  bool any = false;
  for (long k = 0; k < N; ++k)
    any |= static_cast<unsigned long>(of.numbers[k] - i) < static_cast<unsigned long>(n);
  return any;
}
/// One number for each lane of a step, passed from one part of a body to the next: L of them, and
/// at least a vector. Functions on groups overwrite their operands here with their results.
template <class T, long L>
struct Held {
  static constexpr int kCount = L % kFloats ? kFloats : L;
  alignas(64) T of[kCount];
  TESSERA_MEMBER T& operator[](long l) { return of[l]; }
  template <class F>
  TESSERA_MEMBER void become(F f) {
    store(of, f(load<kCount>(of)));
  }
};
/// Loads a vector of bytes, each as an int.
TESSERA_FN Ints ints_of(const unsigned char* p) {
#if defined(__AVX512F__) && !defined(__clang__)
  typedef char Chars __attribute__((vector_size(16), aligned(1), may_alias));
  return Ints(__builtin_ia32_pmovzxbd512_mask(*reinterpret_cast<const Chars*>(p), Ints{},
                                              static_cast<unsigned short>(-1)));
#elif defined(__AVX2__) && !defined(__clang__)
  typedef char Chars __attribute__((vector_size(16)));
  long long low __attribute__((vector_size(16))) = {};
  __builtin_memcpy(&low, p, kFloats);
  return Ints(__builtin_ia32_pmovzxbd256(Chars(low)));
#else
  Ints r;
  for (int l = 0; l < kFloats; ++l) r[l] = p[l];
  return r;
#endif
}
/// The bytes of a step, contiguous in memory, converted to numbers as wide as the step's floats. If
/// the loop read bytes itself, GCC would use vectors of as many bytes as there are lanes for
/// everything in it.
template <long L>
struct Bytes {
  alignas(64) int of[L];
  TESSERA_MEMBER int operator[](long l) const { return of[l]; }
  TESSERA_MEMBER void widen(const unsigned char* from, long n) {
    long l = 0;
    for (; l + kFloats <= n; l += kFloats) *reinterpret_cast<Ints*>(of + l) = ints_of(from + l);
    for (; l < n; ++l) of[l] = from[l];
  }
};
struct Nothing {
  template <class... T>
  TESSERA_MEMBER void operator()(T&&...) const {}
};
/// A body in parts: `bytes` widens the bytes of a step, `before` computes the operands of `groups`,
/// which are functions on whole groups of floats, and `after` continues from their results. A Step
/// carries values from one part to the next.
template <class Step, class Bytes, class Before, class Groups, class After>
struct Staged {
  Bytes bytes;
  Before before;
  Groups groups;
  After after;
};
template <class Step, class Bytes, class Before, class Groups, class After>
TESSERA_FN Staged<Step, Bytes, Before, Groups, After> staged(Bytes bytes, Before before,
                                                             Groups groups, After after) {
  return {bytes, before, groups, after};
}
template <class F>
TESSERA_FN F told(bool, F body) {
  return body;
}
template <class F>
TESSERA_FN auto with(bool holds, F body) {
  return [=](long i, long l, auto&... rest) __attribute__((always_inline)) {
    body(i, l, holds, rest...);
  };
}
template <class F, long N>
TESSERA_FN auto told(bool holds, Asking<F, N> of) {
  return with(holds, of.body);
}
template <class Step, class Bytes, class Before, class Groups, class After, long N>
TESSERA_FN auto told(bool holds, Asking<Staged<Step, Bytes, Before, Groups, After>, N> of) {
  return staged<Step>(of.body.bytes, with(holds, of.body.before), of.body.groups,
                      with(holds, of.body.after));
}
/// Calls body(i + l, l, terms..) for l in [0, n).
template <class F, class... Steps>
TESSERA_FN void each(const F& body, long i, long n, Steps&... steps) {
#pragma GCC ivdep
  for (long l = 0; l < n; ++l) body(i + l, l, steps.of...);
}
template <class Step, class Bytes, class Before, class Groups, class After, class... Steps>
TESSERA_FN void each(const Staged<Step, Bytes, Before, Groups, After>& body, long i, long n,
                     Steps&... steps) {
  Step step = {};
  body.bytes(i, n, step);
#pragma GCC ivdep
  for (long l = 0; l < n; ++l) body.before(i + l, l, step);
  body.groups(step);
#pragma GCC ivdep
  for (long l = 0; l < n; ++l) body.after(i + l, l, step, steps.of...);
}
/// Runs a step of L elements, then `then`, then lets `lanes` (totals, streams) take its terms.
template <long L, class F, class Then, class... Lanes>
TESSERA_FN void whole(long i, const F& body, const Then& then, Lanes&... lanes) {
  [&](typename Lanes::Step... steps) __attribute__((always_inline)) {
    each(body, i, L, steps...);
    then();
    (lanes.take(i, steps), ...);
  }
  (typename Lanes::Step()...);
}
/// Runs a step of n < L elements.
template <class F, class... Lanes>
TESSERA_FN void part(long i, long n, const F& body, Lanes&... lanes) {
  [&](typename Lanes::Step... steps) __attribute__((always_inline)) {
    (lanes.clear(steps), ...);
    each(body, i, n, steps...);
    (lanes.take(i, n, steps), ...);
  }
  (typename Lanes::Step()...);
}
/// Runs through [begin, end) in steps of L.
template <long L, class F, class... Lanes>
TESSERA_FN void in_lanes(long begin, long end, F body, Lanes&... lanes) {
  long i = begin;
  for (; i + L <= end; i += L)
    if (asks(body, i, L))
      whole<L>(i, told(true, body), Nothing(), lanes...);
    else
      whole<L>(i, told(false, body), Nothing(), lanes...);
  if (i < end) part(i, end - i, told(true, body), lanes...);
}
/// Does the same for a body whose lanes are all streams. Its steps may begin anywhere, so they
/// begin where a cache line of the first stream does.
template <long L, class F, class First, class... Rest>
TESSERA_FN void in_streams(long begin, long end, F body, First& first, Rest&... rest) {
  for (long i = begin; i < end;) {
    long n = first.before_line(i);
    if (n == 0)
      for (; i + L <= end; i += L)
        if (asks(body, i, L))
          whole<L>(i, told(true, body), Nothing(), first, rest...);
        else
          whole<L>(i, told(false, body), Nothing(), first, rest...);
    if (n == 0 || n > end - i) n = end - i;
    part(i, n, told(true, body), first, rest...);
    i += n;
  }
}

/// One of several loops that advance together, step by step, if it is `on`. plain(i) says whether
/// the step at i is whole and compares with no position; whole(i, then) runs such a step and calls
/// `then` before it stores; some(i, n) runs any step.
template <class Plain, class Whole, class Some>
struct Strand {
  bool on;
  Plain plain;
  Whole whole;
  Some some;
};
template <class Plain, class Whole, class Some>
TESSERA_FN Strand<Plain, Whole, Some> make_strand(bool on, Plain plain, Whole whole, Some some) {
  return {on, plain, whole, some};
}
template <long L, class F, class... Lanes>
TESSERA_FN auto strand(bool on, F body, Lanes&... lanes) {
  return make_strand(
      on, [=](long i) __attribute__((always_inline)) { return !asks(body, i, L); },
      [ =, &lanes... ](long i, const auto& then)
          __attribute__((always_inline)) { whole<L>(i, told(false, body), then, lanes...); },
      [ =, &lanes... ](long i, long n) __attribute__((always_inline)) {
        if (n == L)
          whole<L>(i, told(true, body), Nothing(), lanes...);
        else
          part(i, n, told(true, body), lanes...);
      });
}
/// A strand whose lanes are all streams, over elements [begin, end); whole steps of the other
/// strands stay within that range. Its steps begin where cache lines of the first stream do, so it
/// is ahead of the others.
template <long L, class F, class First, class... Rest>
TESSERA_FN auto strand_of_lines(bool on, long begin, long end, F body, First& first,
                                Rest&... rest) {
  const long ahead = first.before_line(begin);
  return make_strand(
      on,
      [=](long i) __attribute__((always_inline)) {
        return (ahead == 0 || (i > begin && i + ahead + L <= end)) && !asks(body, i + ahead, L);
      },
      [ =, &first, &rest... ](long i, const auto& then) __attribute__((always_inline)) {
        whole<L>(i + ahead, told(false, body), then, first, rest...);
      },
      [ =, &first, &rest... ](long i, long n) __attribute__((always_inline)) {
        const long to = i + n + ahead < end ? i + n + ahead : end;
        for (long at = i > begin ? i + ahead : begin, m; at < to; at += m) {
          m = at == begin && ahead > 0 ? ahead : L;
          if (m > to - at) m = to - at;
          if (m == L)
            whole<L>(at, told(true, body), Nothing(), first, rest...);
          else
            part(at, m, told(true, body), first, rest...);
        }
      });
}
/// A strand that is `early` elements ahead of the others, up to `end`.
template <long L, class S>
TESSERA_FN auto early_strand(long early, long end, S of) {
  return make_strand(
      of.on,
      [=](long i)
          __attribute__((always_inline)) { return i + early + L <= end && of.plain(i + early); },
      [=](long i, const auto& then) __attribute__((always_inline)) { of.whole(i + early, then); },
      [=](long i, long n) __attribute__((always_inline)) {
        const long left = end - i - early;
        if (left > 0) of.some(i + early, n < left ? n : left);
      });
}
/// Combines the pieces of a row's softmax: max[k] is the maximum of piece k, and sum[k] is the sum
/// of exp(x - m) over the piece, with m the larger of max[k] and the least finite number (a piece
/// may be all -inf). Returns the maximum and the sum of the row, and leaves in max[k] the factor
/// for the exponentials of piece k. If the maximum is infinite the sum is NaN, as that of exp(x -
/// max) is.
struct Softmax {
  float max;
  double sum;
};
constexpr float kLeast = -3.4028234663852886e38f;
TESSERA_FN Softmax join_pieces(float* max, const double* sum, long n) {
  Softmax row = {max[0], 0.0};
  for (long k = 1; k < n; ++k) row.max = max[k] > row.max ? max[k] : row.max;
  for (long k = 0; k < n; ++k) {
    max[k] = exp_by_table((max[k] > kLeast ? max[k] : kLeast) - row.max);
    row.sum += max[k] * sum[k];
  }
  row.sum += row.max - row.max;
  return row;
}
/// Runs a step of each strand. All strands read before one stores: rows are often a multiple of 4
/// KiB apart, and a read waits for a recent store to an address with the same low bits.
TESSERA_FN void together(long) {}
template <class First, class... Rest>
TESSERA_FN void together(long i, const First& first, const Rest&... rest) {
  first.whole(
      i, [&]() __attribute__((always_inline)) { together(i, rest...); });
}
/// Runs through all strands, a step of each in turn: while one waits, another computes.
template <long L, class... Strands>
TESSERA_FN void beside(long begin, long end, Strands... strands) {
  const bool all = (strands.on && ...);
  for (long i = begin; i < end; i += L) {
    for (; all && i + L <= end && (strands.plain(i) && ...); i += L) together(i, strands...);
    if (i < end)
      ((strands.on ? strands.some(i, end - i < L ? end - i : L) : static_cast<void>(0)), ...);
  }
}
/// Adds what sums over rows have collected in single precision to totals in double precision.
template <class T>
TESSERA_FN void move_on(double* to, T* from, long n) {
#pragma GCC ivdep
  for (long i = 0; i < n; ++i) to[i] += from[i], from[i] = T(0);
}
/// Joins the partial results of all chunks, in order, into those of the first chunk.
template <class Op, class T>
TESSERA_FN void combine(T* first, long stride_bytes, long chunks, long n) {
  for (long c = 1; c < chunks; ++c) {
    const T* next = reinterpret_cast<const T*>(reinterpret_cast<char*>(first) + c * stride_bytes);
#pragma GCC ivdep
    for (long i = 0; i < n; ++i) first[i] = Op::join(first[i], next[i]);
  }
}

#endif

}  // namespace tessera::generated
