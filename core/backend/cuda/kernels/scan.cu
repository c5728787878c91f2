// Scans of lines [outer, n, inner] along n: cumsum, cumprod, logcumsumexp, cummax and cummin with
// positions, and the linear recurrence y = a y + b. `lines` gives each line to a thread, in the
// order of the CPU; `blocks` cuts long lines into tiles of 1,024 that a block scans with a carry;
// `warps` gives a warp each of many lines that lie one after another, in the order of `blocks`.
// After math.h and device.h. Invariant: joins are associative but need not commute, so the left
// operand is always the earlier part; their order follows from n alone.
namespace tessera::device {

inline constexpr unsigned kScanThreads = 256;

/// Joins of one number.
template <class T, class Op>
struct ScanJoin {
  using Element = T;
  using C = Compute<T>;
  struct State {
    C value;
  };
  TESSERA_FN State read(const ScanCall& c, long at, long, bool) {
    return {widen(static_cast<const T*>(c.in)[at])};
  }
  TESSERA_FN State join(State x, State y) { return {Op::join(x.value, y.value)}; }
  TESSERA_FN State from_below(State s, unsigned lanes) {
    return {__shfl_up_sync(kAllLanes, s.value, lanes)};
  }
  TESSERA_FN void write(const ScanCall& c, long at, State s) {
    static_cast<T*>(c.out)[at] = Narrow<T>::from(s.value);
  }
};

/// log(exp(a) + exp(b)).
struct LogSum {
  template <class C>
  TESSERA_FN C join(C a, C b) {
    const bool first = a != a || a > b;
    const C high = first ? a : b, low = first ? b : a;
    return high == low ? high + fn::log(C(2)) : high + fn::log1p(fn::exp(low - high));
  }
};
/// The latest of the largest (or smallest) so far; NaN stays, at the latest NaN.
template <class T, bool kLargest>
struct ScanExtreme {
  using C = Compute<T>;
  struct State {
    C value;
    long at;
  };
  TESSERA_FN State read(const ScanCall& c, long at, long k, bool) {
    return {widen(static_cast<const T*>(c.in)[at]), k};
  }
  TESSERA_FN State join(State x, State y) {
    const bool x_nan = x.value != x.value, y_nan = y.value != y.value;
    const bool beats = kLargest ? y.value >= x.value : y.value <= x.value;
    return y_nan || (!x_nan && beats) ? y : x;
  }
  TESSERA_FN State from_below(State s, unsigned lanes) {
    return {__shfl_up_sync(kAllLanes, s.value, lanes), __shfl_up_sync(kAllLanes, s.at, lanes)};
  }
  TESSERA_FN void write(const ScanCall& c, long at, State s) {
    static_cast<T*>(c.out)[at] = Narrow<T>::from(s.value);
    c.positions[at] = s.at;
  }
};
/// y = factor y + term; the first factor of a line counts for nothing.
template <class T>
struct ScanLinear {
  using C = Compute<T>;
  struct State {
    C factor, term;
  };
  TESSERA_FN State read(const ScanCall& c, long at, long, bool first) {
    return {first ? C(0) : widen(static_cast<const T*>(c.in)[at]),
            widen(static_cast<const T*>(c.other)[at])};
  }
  TESSERA_FN State join(State x, State y) {
    return {x.factor * y.factor, y.factor * x.term + y.term};
  }
  TESSERA_FN State from_below(State s, unsigned lanes) {
    return {__shfl_up_sync(kAllLanes, s.factor, lanes), __shfl_up_sync(kAllLanes, s.term, lanes)};
  }
  TESSERA_FN void write(const ScanCall& c, long at, State s) {
    static_cast<T*>(c.out)[at] = Narrow<T>::from(s.term);
  }
};

/// Where step k of a line is: its place along the dim and its offset.
struct ScanStep {
  long k, at;
};
TESSERA_FN ScanStep step_of(const ScanCall& c, unsigned line, unsigned k) {
  const long o = line / c.inner, i = line % c.inner, place = c.reverse ? c.n - 1 - k : k;
  return {place, (o * c.n + place) * c.inner + i};
}

template <class Op>
TESSERA_FN void scan_lines(const ScanCall& c) {
  const unsigned line = blockIdx.x * kScanThreads + threadIdx.x;
  if (line >= c.outer * c.inner || c.n == 0) return;
  ScanStep s = step_of(c, line, 0);
  auto total = Op::read(c, s.at, s.k, true);
  Op::write(c, s.at, total);
  for (unsigned k = 1; k < c.n; ++k) {
    s = step_of(c, line, k);
    total = Op::join(total, Op::read(c, s.at, s.k, false));
    Op::write(c, s.at, total);
  }
}

template <class Op>
TESSERA_FN void scan_blocks(const ScanCall& c) {
  using State = typename Op::State;
  constexpr unsigned kWarps = kScanThreads / kWarp, kTile = kScanThreads * kScanItems;
  __shared__ State warps[kWarps];
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  State carry = {};
  for (unsigned begin = 0; begin < c.n; begin += kTile) {
    // Each thread scans its own items first; places behind the end repeat nothing and count as
    // missing.
    const unsigned first = begin + threadIdx.x * kScanItems;
    State own[kScanItems] = {};
    unsigned have = 0;
#pragma unroll
    for (unsigned j = 0; j < kScanItems; ++j)
      if (first + j < c.n) {
        const ScanStep s = step_of(c, blockIdx.x, first + j);
        const State x = Op::read(c, s.at, s.k, first + j == 0);
        own[j] = j == 0 ? x : Op::join(own[j - (j > 0)], x);
        have = j + 1;
      }
    State sum = own[0];
#pragma unroll
    for (unsigned j = 1; j < kScanItems; ++j)
      if (j < have) sum = own[j];
    // Inclusive over lanes. A lane without items is behind all that have some, so what it holds
    // reaches nobody.
    State before = {};
#pragma unroll
    for (unsigned lanes = 1; lanes < kWarp; lanes *= 2) {
      const State below = Op::from_below(sum, lanes);
      if (lane >= lanes) sum = have ? Op::join(below, sum) : below;
    }
    const State left = Op::from_below(sum, 1);
    if (lane == kWarp - 1) warps[warp] = sum;
    __syncthreads();
    bool any = begin > 0;
    before = carry;
    for (unsigned w = 0; w < warp; ++w) {
      before = any ? Op::join(before, warps[w]) : warps[w];
      any = true;
    }
    if (lane > 0) {
      before = any ? Op::join(before, left) : left;
      any = true;
    }
#pragma unroll
    for (unsigned j = 0; j < kScanItems; ++j)
      if (first + j < c.n)
        Op::write(c, step_of(c, blockIdx.x, first + j).at, any ? Op::join(before, own[j]) : own[j]);
    // A tile that another follows is full, so its last warp's sum is of items alone.
    if (begin + kTile < c.n)
      for (unsigned w = 0; w < kWarps; ++w)
        carry = begin > 0 || w > 0 ? Op::join(carry, warps[w]) : warps[w];
    __syncthreads();
  }
}

template <class T>
using ScanPack = Pack<T, int(kScanItems)>;
/// The steps from `first` on that a thread has, in the order of memory where they are read and
/// written in packs, else in that of the scan.
template <bool kPacks, class T>
TESSERA_FN ScanPack<T> read_items(const ScanCall& c, const T* line, unsigned first) {
  ScanPack<T> x = {};
  if constexpr (kPacks) {
    if (first < c.n)
      x = load<int(kScanItems)>(line + (c.reverse ? c.n - kScanItems - first : first));
  } else {
#pragma unroll
    for (unsigned j = 0; j < kScanItems; ++j)
      if (first + j < c.n) x.of[j] = line[c.reverse ? c.n - 1 - first - j : first + j];
  }
  return x;
}
template <bool kPacks, class T>
TESSERA_FN void write_items(const ScanCall& c, T* line, unsigned first, const ScanPack<T>& x) {
  if constexpr (kPacks) {
    if (first < c.n)
      store<T, int(kScanItems)>(line + (c.reverse ? c.n - kScanItems - first : first), x);
  } else {
#pragma unroll
    for (unsigned j = 0; j < kScanItems; ++j)
      if (first + j < c.n) line[c.reverse ? c.n - 1 - first - j : first + j] = x.of[j];
  }
}
/// From the order of memory to that of the scan, or back.
template <bool kPacks, class T>
TESSERA_FN ScanPack<T> in_order(const ScanCall& c, const ScanPack<T>& x) {
  ScanPack<T> y = x;
  if constexpr (kPacks)
    if (c.reverse) {
#pragma unroll
      for (unsigned j = 0; j < kScanItems; ++j) y.of[j] = x.of[kScanItems - 1 - j];
    }
  return y;
}

/// The scan of what a warp of a block has, after `carry`, to which it is added; `any`: there is
/// something before. Of the items `have` are there.
template <class Op, class T, class State>
TESSERA_FN ScanPack<T> scan_items(const ScanPack<T>& x, unsigned have, bool any, State& carry) {
  const unsigned lane = threadIdx.x % kWarp;
  State own[kScanItems];
  own[0] = {widen(x.of[0])};
#pragma unroll
  for (unsigned j = 1; j < kScanItems; ++j) own[j] = Op::join(own[j - 1], {widen(x.of[j])});
  State sum = own[0];
#pragma unroll
  for (unsigned j = 1; j < kScanItems; ++j)
    if (j < have) sum = own[j];
#pragma unroll
  for (unsigned lanes = 1; lanes < kWarp; lanes *= 2) {
    const State below = Op::from_below(sum, lanes);
    if (lane >= lanes) sum = have ? Op::join(below, sum) : below;
  }
  const State left = Op::from_below(sum, 1);
  State before = carry;
  if (lane > 0) before = any ? Op::join(carry, left) : left;
  ScanPack<T> y;
#pragma unroll
  for (unsigned j = 0; j < kScanItems; ++j)
    y.of[j] = Narrow<T>::from((any || lane > 0 ? Op::join(before, own[j]) : own[j]).value);
  const State last = {__shfl_sync(kAllLanes, sum.value, kWarp - 1)};
  carry = any ? Op::join(carry, last) : last;
  return y;
}

/// A warp does the work of all warps of a block, in their order; it reads all of it first.
template <class Op, bool kPacks>
TESSERA_FN void scan_line(const ScanCall& c, unsigned number) {
  using T = typename Op::Element;
  constexpr unsigned kWarps = kScanThreads / kWarp, kOfWarp = kWarp * kScanItems;
  const T* in = static_cast<const T*>(c.in) + static_cast<long>(number) * c.n;
  T* out = static_cast<T*>(c.out) + static_cast<long>(number) * c.n;
  typename Op::State carry = {};
  for (unsigned begin = 0; begin < c.n; begin += kWarps * kOfWarp) {
    const unsigned own = begin + threadIdx.x % kWarp * kScanItems;
    ScanPack<T> x[kWarps];
#pragma unroll
    for (unsigned w = 0; w < kWarps; ++w) x[w] = read_items<kPacks>(c, in, own + w * kOfWarp);
#pragma unroll
    for (unsigned w = 0; w < kWarps; ++w) {
      const unsigned first = own + w * kOfWarp;
      const unsigned have = first >= c.n ? 0 : min(kScanItems, c.n - first);
      const ScanPack<T> y =
          scan_items<Op>(in_order<kPacks>(c, x[w]), have, begin > 0 || w > 0, carry);
      write_items<kPacks>(c, out, first, in_order<kPacks>(c, y));
    }
  }
}
template <class Op, bool kHeldByWarp>
TESSERA_FN void scan_warps(const ScanCall& c) {
  if constexpr (kHeldByWarp) {
    const unsigned number = blockIdx.x * (kScanThreads / kWarp) + threadIdx.x / kWarp;
    if (number >= c.outer) return;
    if (c.packs)
      scan_line<Op, true>(c, number);
    else
      scan_line<Op, false>(c, number);
  }
}

}  // namespace tessera::device

// instances: SCAN; HELD, whether a warp may hold its states
KERNEL(warps, ScanCall, 256, 2) { scan_warps<SCAN, HELD>(c); }
KERNEL(lines, ScanCall, 256) { scan_lines<SCAN>(c); }
KERNEL(blocks, ScanCall, 256) { scan_blocks<SCAN>(c); }
