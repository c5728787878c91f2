// NVTX ranges: how a program tells the profilers of NVIDIA (nsys, ncu) what it does. Such a tool
// sets NVTX_INJECTION64_PATH to a library of its own, which fills in a table of functions; these
// are our own declarations of that table (NVTX 3, Apache-2.0 WITH LLVM-exception), so nothing of
// the toolkit is needed, to build or to run. Without the variable nothing is loaded, and a question
// costs a load. Invariant: pushes and pops of a thread come in pairs, around which is_on() is asked
// once.
// Internal: not part of the public interface.
#pragma once
#include <atomic>
#include <cstdint>

namespace tessera::nvtx {
namespace detail {

enum class State : uint8_t { kUnknown, kOff, kOn };
inline constinit std::atomic<State> state = State::kUnknown;
/// Loads the tool's library, once, where there is one; warns where it cannot be loaded.
bool attach();

}  // namespace detail

/// Whether a tool listens.
inline bool is_on() {
  const detail::State s = detail::state.load(std::memory_order_acquire);
  return s != detail::State::kOff && (s == detail::State::kOn || detail::attach());
}

/// Begins a range of the calling thread; where is_on().
void push(const char* name);
/// Ends the thread's innermost range.
void pop();

}  // namespace tessera::nvtx
