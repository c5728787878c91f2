// Positions of the largest or smallest along a dim: argmax and argmin. After convert.h and
// device.h. Invariant: of equal values the first counts, and the first NaN before all, in whatever
// order threads meet.
namespace tessera::device {

inline constexpr int kExtremeThreads = 256;

template <class C>
struct Extreme {
  C value;
  long at;
};
template <bool kLargest, class C>
TESSERA_FN Extreme<C> better(Extreme<C> a, Extreme<C> b) {
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  const bool beats = kLargest ? b.value > a.value : b.value < a.value;
  const bool tie = a_nan ? b_nan : b.value == a.value;
  const bool second = (b_nan && !a_nan) || (!a_nan && beats) || (tie && b.at < a.at);
  return second && b.at >= 0 ? b : a.at < 0 ? b : a;
}
/// A block for each row of [outer, n, inner]; strided where inner is not 1.
template <bool kLargest, class T>
TESSERA_FN void extreme(const ReduceCall& c) {
  using C = Compute<T>;
  __shared__ C values[kExtremeThreads];
  __shared__ long places[kExtremeThreads];
  const unsigned o = blockIdx.x / c.inner, i = blockIdx.x % c.inner;
  const T* in = static_cast<const T*>(c.in) + long(o) * c.n * c.inner + i;
  Extreme<C> best = {C(0), -1};
  for (unsigned k = threadIdx.x; k < c.n; k += kExtremeThreads)
    best = better<kLargest>(best, Extreme<C>{widen(in[long(k) * c.inner]), long(k)});
  values[threadIdx.x] = best.value, places[threadIdx.x] = best.at;
  for (unsigned half = kExtremeThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x >= half) continue;
    best =
        better<kLargest>(best, Extreme<C>{values[threadIdx.x + half], places[threadIdx.x + half]});
    values[threadIdx.x] = best.value, places[threadIdx.x] = best.at;
  }
  if (threadIdx.x == 0) static_cast<long*>(c.out)[blockIdx.x] = best.at;
}

}  // namespace tessera::device

// instances: LARGEST, IN
KERNEL(positions, ReduceCall, 256) { extreme<LARGEST, IN>(c); }
