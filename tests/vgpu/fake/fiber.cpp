#include "tests/vgpu/fake/fiber.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>

// The registers that a call preserves in the x86-64 ABI; flags of the floating-point unit are the
// same everywhere, because kernels do not change them.
extern "C" void vgpu_switch_stack(void** from, void* to);
asm(R"(
.text
.globl vgpu_switch_stack
.hidden vgpu_switch_stack
.type vgpu_switch_stack, @function
vgpu_switch_stack:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size vgpu_switch_stack, . - vgpu_switch_stack
)");

namespace vgpu {

namespace {
constexpr size_t kStackBytes = 128 << 10, kPage = 4096;
}

void switch_stack(void** from, void* to) { vgpu_switch_stack(from, to); }

void FiberPool::prepare(Fiber& fiber) const {
  auto* frame = static_cast<void**>(fiber.top) - 8;
  std::fill(frame, frame + 8, nullptr);
  frame[6] = reinterpret_cast<void*>(main_);  // where the first switch returns to
  fiber.stack_pointer = frame;
}

Fiber* FiberPool::take() {
  if (!idle_.empty()) {
    Fiber* fiber = idle_.back();
    idle_.pop_back();
    return fiber;
  }
  auto fiber = std::make_unique<Fiber>();
  void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, kPage, PROT_NONE);
  fiber->stack = static_cast<char*>(memory);
  // Stacks begin at different lines, or the frames of all threads would share a few sets of L1.
  const size_t color = all_.size() % 31 * 192;
  fiber->top =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory) + kStackBytes - color) & ~63ul);
  prepare(*fiber);
  all_.push_back(std::move(fiber));
  return all_.back().get();
}

void FiberPool::reset() {
  idle_.clear();
  for (auto& fiber : all_) {
    prepare(*fiber);
    idle_.push_back(fiber.get());
  }
}

}  // namespace vgpu
