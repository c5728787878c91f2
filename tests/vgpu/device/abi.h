// What the virtual driver and the modules that it loads know of each other. Kernel text is compiled
// behind this file, so it includes nothing. Invariant: one block of threads runs at a time, and the
// driver alone moves `VgpuBlock`.
#pragma once

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct VgpuBlock {
  uint3 thread, block;  // that run now
  dim3 threads, blocks;
  unsigned next, count;         // threads that have not begun; threads of the block
  const unsigned short* order;  // in which they begin: the seed draws it
  unsigned returned;            // threads that have
  unsigned returned_lanes[32];  // the same, by warp
};

enum VgpuJoin { kVgpuPlain, kVgpuCount, kVgpuAnd, kVgpuOr };
enum VgpuAccess { kVgpuRead, kVgpuWrite, kVgpuAtomic };

struct VgpuCalls {
  /// Waits for the threads of the block; joins what they bring.
  int (*barrier)(VgpuJoin join, int mine, int line);
  /// Leaves `bytes` (at most 16) in this lane's slot of 16 bytes and waits for the lanes of `mask`.
  /// The 32 slots hold until the same lanes exchange again.
  const char* (*exchange)(unsigned mask, const void* mine, int bytes, int line);
  /// The kernel reads from a lane that `mask` does not name, or that is not there.
  void (*missing_lane)(unsigned mask, unsigned lane, int line);
  /// A thread that sees an atomic after it also sees the writes before it.
  void (*fence)();
  /// Ends the kernel with `error` (of the driver) and a reason.
  void (*stop)(int error, const char* why, int line);
  /// Checked modules call it at each access of device memory or shared memory.
  void (*touch)(const void* at, int bytes, VgpuAccess kind);
  unsigned long long heap, heap_bytes;  // addresses of device memory
};

struct VgpuKernel {
  void (*run)(void** parameters);  // threads that have not begun, one after the other
  unsigned count;
  const unsigned* sizes;  // of the parameters, in bytes
  unsigned max_threads;   // __launch_bounds__, or 0
};

constexpr unsigned kVgpuDynamicBytes = 227 << 10;  // the most that a block of sm_90 can ask for
constexpr unsigned kVgpuDynamicZone = 1024;        // on both sides: nobody's

struct VgpuModule {
  VgpuBlock* at;
  char *shared, *shared_end;  // static shared memory of all its kernels
  char* dynamic;              // kVgpuDynamicBytes between two zones
  int checked, kernels;
};
