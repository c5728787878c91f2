// Stacks that a kernel's threads run on. A fiber runs until it gives way to another one or to the
// stack that began it, always on one thread of the host at a time. Invariant: a fiber that is
// abandoned (its kernel failed) is reset and used again; nothing on its stack is destroyed.
#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "tests/vgpu/device/abi.h"

namespace vgpu {

struct Fiber {
  void* stack_pointer = nullptr;  // while it does not run
  char* stack = nullptr;          // its memory; the lowest page is closed
  void* top = nullptr;
  uint3 thread{};   // that it runs
  int line = 0;     // of the kernel's text, where it waits
  VgpuJoin join{};  // of the barrier that it waits at
};

/// Fibers of one size, made on demand and kept.
class FiberPool {
 public:
  /// `main` never returns.
  explicit FiberPool(void (*main)()) : main_(main) {}
  Fiber* take();
  void give_back(Fiber* fiber) { idle_.push_back(fiber); }
  /// All fibers are idle again, whatever they were doing.
  void reset();

 private:
  void prepare(Fiber& fiber) const;

  void (*main_)();
  std::vector<std::unique_ptr<Fiber>> all_;
  std::vector<Fiber*> idle_;
};

/// Leaves the running stack's position in `*from` and goes on at `to`.
void switch_stack(void** from, void* to);

}  // namespace vgpu
