// Runs the blocks of a launch one after the other on the calling thread. A thread of a block runs
// until it waits for others (a barrier, an exchange of its warp) and gives way on a fiber then, so
// a block of N threads costs N calls, and a switch of stacks for each thread and wait. Invariant: a
// thread that waits is released only when all threads that it waits for have come; where one of
// them cannot come any more, this is reported.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/backend/cuda/driver_api.h"
#include "tests/vgpu/device/abi.h"

namespace vgpu {

using tessera::cuda::Result;

/// Why a kernel or a copy failed: what every later call returns, and the text for stderr.
struct OpError : std::runtime_error {
  OpError(Result r, const std::string& text) : std::runtime_error(text), result(r) {}
  Result result;
};

struct Launch {
  const VgpuKernel* kernel;
  const VgpuModule* module;
  dim3 blocks, threads;
  unsigned dynamic_bytes;
  void** parameters;
  uint64_t seed;  // orders blocks and threads; 0: as they are numbered
  std::string name;
};

/// Throws OpError for what a kernel may not do.
void run_blocks(const Launch& launch);

/// Where a kernel is at: nothing of it where no kernel runs on this thread.
struct Place {
  bool running = false;
  uint64_t block = 0;                 // number in the grid
  uint32_t thread = 0, barriers = 0;  // number in the block; barriers that it has passed
  bool atomic = false;                // the block has made an atomic access
};
const Place& place();
/// "block (1,0,0) thread (3,0,0)" of the thread that runs, or "".
std::string where_it_runs();
/// Block `number` of the running launch has made its earlier writes visible (a fence, then an
/// atomic access), as blocks do that count themselves in.
bool has_published(uint64_t block);
/// Ends the kernel that runs, from one of its threads or from a signal's handler; a copy, which has
/// no threads, by an exception.
[[noreturn]] void stop(Result result, const std::string& why);
/// Where a handler continues so that stop() is called on a stack that is whole; null where no
/// kernel runs.
void* fresh_stack();

/// What modules call. `touch`: accesses of checked modules that are none of shared memory.
const VgpuCalls* module_calls(uintptr_t heap, size_t heap_bytes,
                              void (*touch)(const void* at, int bytes, VgpuAccess kind));

}  // namespace vgpu
