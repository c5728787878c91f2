// What generated kernels stand on, besides the functors: rounding to narrow dtypes, and reductions
// in interleaved lanes (threads, on a GPU) that meet in a balanced tree, so that their order is a
// property of the text and not of the vector width. Printed in front of the kernels of a file,
// behind the functors; like those it includes nothing.
namespace tessera::generated {

using namespace fn;

TESSERA_FN float as_bf16(float x) { return widen(to_bf16(x)); }
TESSERA_FN float as_f16(float x) { return widen(to_f16(x)); }
TESSERA_FN long as_i32(long x) { return static_cast<int>(x); }
TESSERA_FN long as_u8(long x) { return static_cast<unsigned char>(x); }
/// No integer is -0, but GCC 12 makes float(long(x)) a trunc(x), which keeps the sign of -0.5. The
/// barrier hides from it that the sum does something.
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
/// NaN wins, here and in Min. `prefer` is one instruction, and keeps `a` where b is NaN.
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

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

/// `value` of all threads of the block, for each of them: thread i meets thread i + half, and so
/// on. Every thread of the block calls it.
template <class Op, class T>
TESSERA_FN T block_reduce(T value) {
  __shared__ T shared[1024];
  shared[threadIdx.x] = value;
  __syncthreads();
  for (unsigned n = blockDim.x; n > 1;) {
    const unsigned half = (n + 1) / 2;
    if (threadIdx.x + half < n)
      shared[threadIdx.x] = Op::join(shared[threadIdx.x], shared[threadIdx.x + half]);
    __syncthreads();
    n = half;
  }
  const T result = shared[0];
  __syncthreads();
  return result;
}

#else

#define TESSERA_MEMBER inline __attribute__((always_inline))

template <class Op, class T>
TESSERA_FN void start(T* to, long n) {
  for (long i = 0; i < n; ++i) to[i] = Op::template start<T>();
}
/// What lanes of T hold: there are no vectors of bool.
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
/// Maxima and minima of what is no NaN, or where it does not matter whether they are one then.
template <class Op>
struct Numbers : Op {
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return Op::prefer(b, a);
  }
};
/// A register's worth of N elements, or of as many as 64 bytes hold.
template <class T, long N>
struct Wide {
  static constexpr long kWidth = N < 64 / long(sizeof(T)) ? N : 64 / long(sizeof(T));
  static constexpr long kCount = N / kWidth;
  typedef T Vector __attribute__((vector_size(kWidth * sizeof(T)), aligned(alignof(T)), may_alias));
};
/// Lane i meets lane i + L / 2, and so on.
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
/// What a step of a loop leaves in each of L lanes, for as long as the step takes: in registers.
template <class T, long L>
struct Terms {
  alignas(64) T of[L];
  TESSERA_MEMBER Terms() {}
};
/// Running totals in L interleaved lanes of the terms of each step. Maxima of floats are taken as
/// if there were no NaN, and where there was one is kept beside them: the next element waits for
/// one instruction and not for three.
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
  /// Terms that change nothing.
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
/// To memory past the caches, where the target can.
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
/// Before other threads may be told that streamed results are there.
TESSERA_FN void finish_streams() {
#if defined(__SSE__)
  __builtin_ia32_sfence();
#endif
}
/// Elements of the result at `to` on their way past the caches, L at a time, in whole lines: where
/// that is not wanted, or these do not begin at a line, and for fewer, stores are ordinary.
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
  /// How many elements from i on do not fill a line.
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
/// What an operand is read of next, on its way to a cache of that level, L elements at a time.
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
/// A body that compares its index with some numbers: it is told of steps that hold none of them.
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
/// A number of each lane of a step, on its way from one part of a body to the next: L of them, and
/// at least a vector. Functions of groups put their results in the place of their operands.
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
/// A vector of bytes, each as an int.
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
/// Bytes of a step, one after the other in memory, as numbers as wide as its floats: in a loop that
/// reads bytes itself GCC takes vectors of as many bytes as there are lanes for all that it does.
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
/// A body in parts: `bytes` widens those of a step, `before` computes the operands of `groups`,
/// functions of whole groups of floats, and `after` goes on from there. What one leaves for the
/// next is in a Step.
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
/// body(i + l, l, terms..) for l in [0, n).
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
/// A step of L; then `then`; then `lanes` take the terms: totals, streams.
template <long L, class F, class Then, class... Lanes>
TESSERA_FN void whole(long i, const F& body, const Then& then, Lanes&... lanes) {
  [&](typename Lanes::Step... steps) __attribute__((always_inline)) {
    each(body, i, L, steps...);
    then();
    (lanes.take(i, steps), ...);
  }
  (typename Lanes::Step()...);
}
/// The same for fewer.
template <class F, class... Lanes>
TESSERA_FN void part(long i, long n, const F& body, Lanes&... lanes) {
  [&](typename Lanes::Step... steps) __attribute__((always_inline)) {
    (lanes.clear(steps), ...);
    each(body, i, n, steps...);
    (lanes.take(i, n, steps), ...);
  }
  (typename Lanes::Step()...);
}
/// Steps of L through [begin, end).
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
/// The same for streams alone, whose steps may begin anywhere: where lines of the first do.
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

/// A loop in steps that others are gone through beside, if it is `on`: whether a step is whole and
/// plain, such a step, with what is to be done before it stores, and any step.
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
/// The same for streams alone, of elements [begin, end), which whole steps of the others stay in.
/// Its steps begin where lines of the first do, ahead of the others'.
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
/// A strand that is `early` elements ahead of the others, until `end`.
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
/// A row's exponentials below its maximum, found in pieces: max[k] is the maximum of piece k,
/// sum[k] the sum of its exponentials below the larger of that and the least number (a piece may be
/// all -inf). Gives the row's maximum and sum, and leaves in max[k] what exponentials of piece k
/// are to be multiplied by. The sum of a row whose maximum is infinite is NaN, as that of exp(x -
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
/// A step of each strand. All of them read before one stores: rows are often a multiple of 4 KiB
/// apart, and what is read where another row has just been stored, by the low bits of the address,
/// waits for that.
TESSERA_FN void together(long) {}
template <class First, class... Rest>
TESSERA_FN void together(long i, const First& first, const Rest&... rest) {
  first.whole(
      i, [&]() __attribute__((always_inline)) { together(i, rest...); });
}
/// Goes through strands, a step of each after the other: while one waits another computes.
template <long L, class... Strands>
TESSERA_FN void beside(long begin, long end, Strands... strands) {
  const bool all = (strands.on && ...);
  for (long i = begin; i < end; i += L) {
    for (; all && i + L <= end && (strands.plain(i) && ...); i += L) together(i, strands...);
    if (i < end)
      ((strands.on ? strands.some(i, end - i < L ? end - i : L) : static_cast<void>(0)), ...);
  }
}
/// Moves what sums over rows have collected on to double precision.
template <class T>
TESSERA_FN void move_on(double* to, T* from, long n) {
#pragma GCC ivdep
  for (long i = 0; i < n; ++i) to[i] += from[i], from[i] = T(0);
}
/// Joins the partial results of all chunks, in order, into those of the first.
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
