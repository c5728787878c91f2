// What the threads of a card share: accesses of up to 16 bytes, and joins over a warp and over a
// block in a fixed order. For CUDA C++ only; include joins.h first. Invariant: the order of a join
// depends on the number of threads, never on their timing.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

namespace tessera::fn {

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

/// N elements that are read or written at once; 16 bytes at most.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T of[N];
};
template <int N, class T>
TESSERA_FN Pack<T, N> load(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <class T, int N>
TESSERA_FN void store(T* p, const Pack<T, N>& x) {
  *reinterpret_cast<Pack<T, N>*>(p) = x;
}
/// The same where a pack may not be aligned (`whole` false): element by element.
template <int N, class T>
TESSERA_FN Pack<T, N> load(const T* p, bool whole) {
  if (whole) return load<N>(p);
  Pack<T, N> x;
#pragma unroll
  for (int i = 0; i < N; ++i) x.of[i] = p[i];
  return x;
}
template <class T, int N>
TESSERA_FN void store(T* p, const Pack<T, N>& x, bool whole) {
  if (whole) return store(p, x);
#pragma unroll
  for (int i = 0; i < N; ++i) p[i] = x.of[i];
}

template <class T>
TESSERA_FN T from_lane(T x, unsigned lanes) {
  return __shfl_xor_sync(kAllLanes, x, lanes);
}
TESSERA_FN bool from_lane(bool x, unsigned lanes) {
  return __shfl_xor_sync(kAllLanes, static_cast<int>(x), lanes) != 0;
}
/// Whether the join of two equal numbers has the bits of one side: of zeros with two signs, of NaN.
template <class Op>
inline constexpr bool kSided = false;
template <>
inline constexpr bool kSided<Max> = true;
template <>
inline constexpr bool kSided<Min> = true;
template <class T>
TESSERA_FN T of_first_lane(T x) {
  return __shfl_sync(kAllLanes, x, 0);
}
TESSERA_FN bool of_first_lane(bool x) {
  return __shfl_sync(kAllLanes, static_cast<int>(x), 0) != 0;
}
/// Joins `x` over the lanes of a warp, for all of them: lane i with i ^ 16, then i ^ 8, and so on.
/// Every lane gets the same bits.
template <class Op, class T>
TESSERA_FN T warp_join(T x) {
#pragma unroll
  for (unsigned lanes = kWarp / 2; lanes > 0; lanes /= 2) x = Op::join(x, from_lane(x, lanes));
  if constexpr (kSided<Op>) return of_first_lane(x);
  return x;
}
/// Joins `x` over `kThreads` threads of a block, for all of them: over lanes, then over warps in
/// order. Every thread of the block calls it.
template <class Op, int kThreads, class T>
TESSERA_FN T block_join(T x) {
  constexpr unsigned kWarps = kThreads / kWarp;
  x = warp_join<Op>(x);
  if constexpr (kWarps > 1) {
    __shared__ T warps[kWarps];
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = warps[0];
#pragma unroll
    for (unsigned w = 1; w < kWarps; ++w) x = Op::join(x, warps[w]);
    __syncthreads();
  }
  return x;
}

}  // namespace tessera::fn

#endif
