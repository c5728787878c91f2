// CUDA C++ as plain C++: what the virtual NVRTC puts in front of a kernel's text before g++
// compiles it. The threads of a block run one after the other on fibers of the virtual driver,
// which is entered only where a thread waits for others: a kernel without barriers is a loop over
// its threads. `__global__`, `__launch_bounds__` and `__shared__` are no macros: the virtual NVRTC
// reads them in the preprocessed text. Invariant: includes nothing of the system, or each kernel
// would take a second to compile.
#pragma once
#include "device/abi.h"

#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
#define __builtin_align__(n) alignas(n)

// Accesses that the driver is not told of.
#ifdef VGPU_CHECKED
#define VGPU_UNCHECKED __attribute__((no_sanitize("thread"), noinline))
#else
#define VGPU_UNCHECKED inline
#endif

using size_t = decltype(sizeof(0));

extern "C" {
__attribute__((visibility("hidden"))) extern VgpuBlock vgpu_at;
__attribute__((visibility("hidden"))) extern const VgpuCalls* vgpu_call;
__attribute__((visibility("hidden"))) extern char vgpu_dynamic[];
}
static constexpr const uint3& threadIdx = vgpu_at.thread;
static constexpr const uint3& blockIdx = vgpu_at.block;
static constexpr const dim3& blockDim = vgpu_at.threads;
static constexpr const dim3& gridDim = vgpu_at.blocks;
static constexpr int warpSize = 32;

namespace vgpu {

template <auto kKernel>
struct Entry;
template <class... A, void (*kKernel)(A...)>
struct Entry<kKernel> {
  static constexpr unsigned sizes[] = {sizeof(A)..., 0};
  template <int... I>
  struct Indices {};
  template <int... I>
  VGPU_UNCHECKED static void run(void** p, Indices<I...>) {  // parameters are the driver's memory
    while (vgpu_at.next < vgpu_at.count) {
      unsigned t = vgpu_at.order[vgpu_at.next++];
      const unsigned x = vgpu_at.threads.x, y = vgpu_at.threads.y;
      if (y == 1 && vgpu_at.threads.z == 1)
        vgpu_at.thread = {t, 0, 0};
      else
        vgpu_at.thread = {t % x, t / x % y, t / x / y};
      kKernel(*static_cast<A*>(p[I])...);
      // Threads that waited have moved to other fibers meanwhile; this one's number is in the
      // block.
      t = vgpu_at.thread.x + x * (vgpu_at.thread.y + y * vgpu_at.thread.z);
      ++vgpu_at.returned;
      vgpu_at.returned_lanes[t / 32] |= 1u << (t & 31);
    }
  }
  template <int... I>
  static auto indices(Indices<I...>) {
    if constexpr (sizeof...(I) == sizeof...(A))
      return Indices<I...>();
    else
      return indices(Indices<I..., static_cast<int>(sizeof...(I))>());
  }
  static void threads(void** p) { run(p, indices(Indices<>())); }
};

inline unsigned thread_number() {
  return vgpu_at.thread.x +
         vgpu_at.threads.x * (vgpu_at.thread.y + vgpu_at.threads.y * vgpu_at.thread.z);
}
inline unsigned lane() { return thread_number() & 31; }

}  // namespace vgpu

// The virtual NVRTC appends one for each kernel that it finds.
#define VGPU_KERNEL(name, bound)                                                             \
  extern "C" __attribute__((visibility("default"))) const VgpuKernel vgpu_kernel_##name = {  \
      vgpu::Entry<&name>::threads, sizeof(vgpu::Entry<&name>::sizes) / sizeof(unsigned) - 1, \
      vgpu::Entry<&name>::sizes, bound};

// ---- barriers and fences ----

#define __syncthreads() ((void)vgpu_call->barrier(kVgpuPlain, 0, __LINE__))
#define __syncthreads_count(p) vgpu_call->barrier(kVgpuCount, (p) != 0, __LINE__)
#define __syncthreads_and(p) vgpu_call->barrier(kVgpuAnd, (p) != 0, __LINE__)
#define __syncthreads_or(p) vgpu_call->barrier(kVgpuOr, (p) != 0, __LINE__)
#define __syncwarp(...) \
  ((void)vgpu_call->exchange(vgpu::full_mask(__VA_ARGS__), nullptr, 0, __LINE__))
inline void __threadfence() { vgpu_call->fence(); }
inline void __threadfence_system() { vgpu_call->fence(); }
inline void __threadfence_block() {}
#define __trap() vgpu_call->stop(719, "__trap", __LINE__)
#define assert(what) \
  ((what) ? (void)0 : vgpu_call->stop(710, "assertion `" #what "' failed", __LINE__))
inline void __nanosleep(unsigned) {}
inline long long clock64() { return static_cast<long long>(__builtin_ia32_rdtsc()); }
inline int clock() { return static_cast<int>(clock64()); }

// ---- warps ----

namespace vgpu {

inline unsigned full_mask(unsigned mask = 0xffffffffu) { return mask; }

template <class T>
VGPU_UNCHECKED T from_slot(const char* slots, unsigned lane) {  // slots are the driver's memory
  T value;
  __builtin_memcpy(&value, slots + 16 * lane, sizeof(T));
  return value;
}
/// What `from` brought; lanes outside the segment of `width` give their own.
template <class T>
T shuffle(unsigned mask, T mine, unsigned from, bool inside, int line) {
  static_assert(sizeof(T) <= 16);
  const char* slots = vgpu_call->exchange(mask, &mine, sizeof(T), line);
  if (!inside) return mine;
  from &= 31;
  const unsigned number = (thread_number() & ~31u) + from;
  if (!(mask >> from & 1) || number >= vgpu_at.count) vgpu_call->missing_lane(mask, from, line);
  return from_slot<T>(slots, from);
}
template <class T>
T shuffle_index(int line, unsigned mask, T mine, unsigned from, unsigned width = 32) {
  return shuffle(mask, mine, (lane() & ~(width - 1)) | (from & (width - 1)), true, line);
}
template <class T>
T shuffle_xor(int line, unsigned mask, T mine, unsigned lanes, unsigned width = 32) {
  const unsigned from = lane() ^ lanes;
  return shuffle(mask, mine, from, from / width <= lane() / width, line);
}
template <class T>
T shuffle_down(int line, unsigned mask, T mine, unsigned by, unsigned width = 32) {
  const unsigned from = lane() + by;
  return shuffle(mask, mine, from, from / width == lane() / width, line);
}
template <class T>
T shuffle_up(int line, unsigned mask, T mine, unsigned by, unsigned width = 32) {
  return shuffle(mask, mine, lane() - by, (lane() & (width - 1)) >= by, line);
}
inline unsigned ballot(int line, unsigned mask, bool mine) {
  const char* slots = vgpu_call->exchange(mask, &mine, 1, line);
  const unsigned first = thread_number() & ~31u;
  unsigned bits = 0;
  for (unsigned l = 0; l < 32 && first + l < vgpu_at.count; ++l)
    if (mask >> l & 1 && from_slot<char>(slots, l)) bits |= 1u << l;
  return bits;
}
/// The lanes of `mask` that a block of fewer threads has.
inline unsigned present(unsigned mask) {
  const unsigned left = vgpu_at.count - (thread_number() & ~31u);
  return left >= 32 ? mask : mask & ((1u << left) - 1);
}
template <class T>
unsigned match_any(int line, unsigned mask, T mine) {
  const char* slots = vgpu_call->exchange(mask, &mine, sizeof(T), line);
  unsigned bits = 0;
  for (unsigned l = 0; l < 32; ++l)
    if (present(mask) >> l & 1 && from_slot<T>(slots, l) == mine) bits |= 1u << l;
  return bits;
}
template <class T>
unsigned match_all(int line, unsigned mask, T mine, int* all) {
  const unsigned same = match_any(line, mask, mine);
  *all = same == present(mask);
  return *all ? mask : 0;
}
template <class T, class Join>
T reduce(int line, unsigned mask, T mine, Join join) {
  const char* slots = vgpu_call->exchange(mask, &mine, sizeof(T), line);
  T result{};
  bool first = true;
  for (unsigned l = 0; l < 32; ++l)
    if (present(mask) >> l & 1) {
      const T other = from_slot<T>(slots, l);
      result = first ? other : join(result, other);
      first = false;
    }
  return result;
}

}  // namespace vgpu

#define __shfl_sync(...) vgpu::shuffle_index(__LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) vgpu::shuffle_xor(__LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) vgpu::shuffle_down(__LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) vgpu::shuffle_up(__LINE__, __VA_ARGS__)
#define __ballot_sync(mask, p) vgpu::ballot(__LINE__, mask, p)
#define __any_sync(mask, p) (vgpu::ballot(__LINE__, mask, p) != 0)
#define __all_sync(mask, p) (vgpu::ballot(__LINE__, mask, !(p)) == 0)
#define __match_any_sync(mask, x) vgpu::match_any(__LINE__, mask, x)
#define __match_all_sync(mask, x, all) vgpu::match_all(__LINE__, mask, x, all)
#define VGPU_REDUCE(name, expression)                                              \
  template <class T>                                                               \
  inline T vgpu_reduce_##name(int line, unsigned mask, T mine) {                   \
    return vgpu::reduce(line, mask, mine, [](T a, T b) { return T(expression); }); \
  }
VGPU_REDUCE(add, a + b)
VGPU_REDUCE(min, b < a ? b : a)
VGPU_REDUCE(max, b > a ? b : a)
VGPU_REDUCE(and, a& b)
VGPU_REDUCE(or, a | b)
VGPU_REDUCE(xor, a ^ b)
#undef VGPU_REDUCE
#define __reduce_add_sync(mask, x) vgpu_reduce_add(__LINE__, mask, x)
#define __reduce_min_sync(mask, x) vgpu_reduce_min(__LINE__, mask, x)
#define __reduce_max_sync(mask, x) vgpu_reduce_max(__LINE__, mask, x)
#define __reduce_and_sync(mask, x) vgpu_reduce_and(__LINE__, mask, x)
#define __reduce_or_sync(mask, x) vgpu_reduce_or(__LINE__, mask, x)
#define __reduce_xor_sync(mask, x) vgpu_reduce_xor(__LINE__, mask, x)
/// Threads of a warp run one after the other, so the one that asks is alone.
inline unsigned __activemask() { return 1u << vgpu::lane(); }

// ---- atomics: one thread runs at a time, so they are plain; checked modules tell them apart ----

#ifdef VGPU_CHECKED
#define VGPU_ATOMIC(p) vgpu_call->touch(p, sizeof(*(p)), kVgpuAtomic)
#else
#define VGPU_ATOMIC(p) ((void)0)
#endif
#define VGPU_ATOMIC_OP(name, expression)     \
  template <class T, class V>                \
  VGPU_UNCHECKED T name(T* p, V v) {         \
    VGPU_ATOMIC(p);                          \
    const T old = *p, x = static_cast<T>(v); \
    *p = static_cast<T>(expression);         \
    return old;                              \
  }
VGPU_ATOMIC_OP(atomicAdd, old + x)
VGPU_ATOMIC_OP(atomicSub, old - x)
VGPU_ATOMIC_OP(atomicExch, x)
VGPU_ATOMIC_OP(atomicMin, x < old ? x : old)
VGPU_ATOMIC_OP(atomicMax, x > old ? x : old)
VGPU_ATOMIC_OP(atomicAnd, old& x)
VGPU_ATOMIC_OP(atomicOr, old | x)
VGPU_ATOMIC_OP(atomicXor, old ^ x)
VGPU_ATOMIC_OP(atomicInc, old >= x ? 0 : old + 1)
VGPU_ATOMIC_OP(atomicDec, old == 0 || old > x ? x : old - 1)
#undef VGPU_ATOMIC_OP
/// 16, 32 and 64 bits.
template <class T>
VGPU_UNCHECKED T atomicCAS(T* p, T compare, T v) {
  VGPU_ATOMIC(p);
  const T old = *p;
  *p = old == compare ? v : old;
  return old;
}

#include "device/numbers.h"
