// Work of the device: ops in a graph. An op runs after the op before it in its stream and after the
// events that its stream waits for, and after nothing else. A vector clock says what happens before
// an op; it is made when the op is submitted, whatever the order in which ops run. Invariant: op
// numbers grow in the order of submission.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace vgpu {

/// Entry `lane` counts the ops of that lane that happened before. A lane is a stream, or a branch
/// of an instantiated graph: its ops are in order.
class Clock {
 public:
  uint32_t operator[](uint32_t lane) const { return lane < times_.size() ? times_[lane] : 0; }
  void set(uint32_t lane, uint32_t time) {
    if (lane >= times_.size()) times_.resize(lane + 1);
    times_[lane] = time;
  }
  void join(const Clock& other) {
    if (other.times_.size() > times_.size()) times_.resize(other.times_.size());
    for (size_t i = 0; i < other.times_.size(); ++i)
      times_[i] = std::max(times_[i], other.times_[i]);
  }

 private:
  std::vector<uint32_t> times_;
};

struct Capture;
struct KernelCall;
enum class OpKind { kKernel, kMemcpy, kMemset, kHost, kEvent, kMarker };

struct Op {
  OpKind kind = OpKind::kMarker;
  std::string name;
  int device = 0;
  std::function<void()> run;
  // Instead of `run`: called until it returns true. Other ops run between its calls, as an op that
  // waits for another device must not hold up those of this one.
  std::function<bool()> poll;
  // Grows with what `poll` waits for: calls in vain are left out, as each opens device memory.
  std::function<uint64_t()> news;
  uint64_t seen = 0;   // of `news`, at the latest call
  bool begun = false;  // `poll` was called
  // Gives the op of a launch what it polls, where this one is a node of a graph that is polled.
  std::function<void(const std::shared_ptr<Op>&)> launched;
  std::shared_ptr<void> owned;  // what the graph of the node keeps
  std::vector<std::shared_ptr<Op>> after;
  Clock clock;  // all that happens before it, itself included
  uint32_t lane = 0, number = 0;
  enum { kPending, kRunning, kDone } state = kPending;
  std::shared_ptr<Capture> capture;  // it is recorded, and never runs itself
  std::shared_ptr<KernelCall> call;  // of a kernel
  struct HostBuffer {
    const void* at;
    size_t bytes;
    bool writes;
  };
  std::vector<HostBuffer> host_buffers;  // what it uses of pinned ones
  std::string refused;                   // why it must not run
  std::chrono::steady_clock::time_point finished;

  bool done() const { return state == kDone; }
};
using OpRef = std::shared_ptr<Op>;

}  // namespace vgpu
