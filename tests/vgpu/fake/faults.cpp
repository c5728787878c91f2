// What a wild access of this process touched. A kernel's fault ends the kernel, as an error of the
// device; the host's fault ends the process with a line that names the memory: it has no business
// in device memory, nor in a pinned buffer that a copy is using. Invariant: the handler itself only
// finds words; a kernel is ended from a stack of its own, after the handler has returned.
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>

#include "tests/vgpu/fake/block.h"
#include "tests/vgpu/fake/gpu.h"

namespace vgpu {

namespace {

std::string fault_text;
struct sigaction previous_action;

void end_kernel() { stop(Result::kIllegalAddress, fault_text); }

std::string what_the_host_touches(uintptr_t at) {
  Gpu& g = gpu();
  if (g.memory.contains(at))
    return "the host touches device memory: " + g.memory.describe(at, g.next_number()) +
           "; copy it, or launch a kernel";
  if (const Op* user = g.pinned.user_of_page(at))
    return "the host touches a pinned buffer that '" + user->name +
           "' still uses; wait for it first";
  return "";
}

std::string what_the_kernel_touches(uintptr_t at, const Op& op) {
  Gpu& g = gpu();
  if (at < 4096) return "touches a null pointer";
  if (g.memory.contains(at)) {
    const Life* life = nullptr;
    const std::string wrong = g.memory.refuses(at, 1, op.number, op.device, &life);
    return wrong.empty() ? "touches " + g.memory.describe(at, op.number) : wrong;
  }
  char hex[24];
  std::snprintf(hex, sizeof(hex), "0x%zx", at);
  return std::string("touches memory that is none of the device's, at ") + hex;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  const OpRef op = gpu().running();
  if (op && runs_here()) {
    if (void* stack = fresh_stack()) {
      fault_text = what_the_kernel_touches(at, *op);
      auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
      registers[REG_RIP] = reinterpret_cast<greg_t>(&end_kernel);
      registers[REG_RSP] = static_cast<greg_t>((reinterpret_cast<uintptr_t>(stack) & ~15ul) - 136);
      return;
    }
  }
  std::string text = op && runs_here() ? op->name + " touches memory that is not there"
                                       : what_the_host_touches(at);
  if (!text.empty()) {
    text = "vgpu: " + text + "\n";
    if (write(2, text.data(), text.size()) < 0) _exit(3);
  }
  sigaction(signal, &previous_action,
            nullptr);  // the instruction faults again, for who was there before
}

}  // namespace

// A kernel that uses up its stack has none left for the handler.
void use_signal_stack() {
  thread_local bool done = false;
  if (done) return;
  done = true;
  stack_t current = {};
  if (sigaltstack(nullptr, &current) == 0 && !(current.ss_flags & SS_DISABLE)) return;
  constexpr size_t kBytes = 128 << 10;
  stack_t stack = {};
  stack.ss_sp = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  stack.ss_size = kBytes;
  if (stack.ss_sp != MAP_FAILED) sigaltstack(&stack, nullptr);
}

void install_fault_handler() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous_action);
}

}  // namespace vgpu
