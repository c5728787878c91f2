// The virtual devices of this process: their work, their memory, and the scheduler. It runs an op
// late (when somebody waits for it), at once (eager), or at times that a seed draws, so that a
// missing wait gives wrong values. Invariant: one op runs at a time, under the mutex; functions of
// the host alone run without it. Nothing here is destroyed: threads of the program may end after
// main.
#pragma once
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/backend/cuda/driver_api.h"
#include "tests/vgpu/fake/memory.h"
#include "tests/vgpu/fake/op.h"
#include "tests/vgpu/fake/order.h"
#include "tests/vgpu/fake/pinned.h"
#include "tests/vgpu/fake/shadow.h"

namespace vgpu {

using tessera::cuda::Result;

/// What VGPU_* of the environment say.
struct Settings {
  int devices = 1;                                // VGPU_DEVICES
  size_t memory_bytes = size_t{4} << 30;          // VGPU_MEMORY, of each device
  enum { kLate, kEager, kRandom } order = kLate;  // VGPU_SEED: late (or 0), eager, or a number
  uint64_t seed = 0;
  bool checked = false;  // VGPU_CHECK=1
  bool trace = false;    // VGPU_TRACE=1: each op that runs, on stderr
  int progress_ms = 20;  // VGPU_PROGRESS_MS: idle time after which ops run by themselves
  std::string counters;  // VGPU_COUNTERS=FILE: what was called and what ran, written at exit
  std::string fail_op;   // VGPU_FAIL=NAME[:NTH[:ERROR]]: this kernel or copy fails
  int fail_nth = 1, fail_error = 700;
};

struct StreamState {
  int device = 0;
  uint32_t lane = 0;
  OpRef last;
  std::vector<OpRef> waits;  // events since then
  std::shared_ptr<Capture> capture;
};

struct Device {
  size_t used_bytes = 0;
  uint64_t peers = 0;               // devices whose memory it may use, a bit each
  Result error = Result::kSuccess;  // of a kernel: every later call says so
  int streams = 0;
};

struct Counters {
  uint64_t runs = 0, bytes_read = 0, bytes_written = 0;
};

class Gpu {
 public:
  std::mutex mutex;
  Settings settings;
  Memory memory;
  Pinned pinned;
  std::unique_ptr<Shadow> shadow;  // of checked runs
  std::unique_ptr<Order> order;    // while a test records it
  std::vector<Device> devices;
  std::map<std::string, Counters> counters;  // of ops, by name
  Counters kernels;                          // of all of them together
  std::map<const char*, uint64_t> calls;     // of the driver, and waits of copies, by literals

  Gpu();
  uint32_t new_lane(int device);
  /// All its ops are done, or it is not used again.
  void give_back_lane(uint32_t lane);
  /// The number that the next op gets.
  uint32_t next_number() const { return next_number_; }

  /// Behind what the stream has; a recorded node where the stream is captured. Runs nothing: who
  /// calls says run_some() when the op is complete.
  OpRef submit(StreamState& stream, OpKind kind, std::string name, std::function<void()> run,
               std::vector<Op::HostBuffer> host_buffers = {});
  /// An op that waits for other devices (Op::poll), on a stream that is not captured.
  OpRef submit_polled(StreamState& stream, std::string name, std::function<bool()> poll,
                      std::function<uint64_t()> news);
  /// An op whose `after`, lane and device are set.
  void add(const OpRef& op);
  /// By the seed: nothing, or some of what may run now.
  void run_some();
  /// The host waits for an op.
  void wait_for(const OpRef& op);
  /// True where it is done; makes some progress otherwise, as a device does meanwhile.
  bool query(const OpRef& op);
  void wait_for_all(int device);
  /// All that was submitted before, on every device.
  void drain();
  /// How often the program made `call`, by name.
  uint64_t count_of(std::string_view call) const;
  OpRef running() const { return running_; }
  void fail(int device, Result result, const std::string& text);
  uint64_t draw() { return random_(); }

 private:
  enum class Hosts { kToo, kNot };
  /// False: nothing may run now. Functions of the host may wait for what the caller does next, so
  /// they are left to the thread of progress() where the caller does not wait.
  bool run_one(Hosts hosts);
  void hurry();
  /// False: it waits for other devices, and is to be run again.
  bool run_op(const OpRef& op);
  void run_host_function(const OpRef& op);
  void finish(const OpRef& op);
  bool execute(const OpRef& op);
  void see_end(const OpRef& op);
  /// Lets others work, where an op that the host waits for waits for them.
  void await_peers();
  template <class Wait>
  void without_lock(Wait wait);
  void wait_until_idle(std::unique_lock<std::mutex>& lock);
  bool fails_on_request(const Op& op);
  void progress();

  std::mt19937_64 random_;
  std::vector<OpRef> pending_;  // in the order of submission
  uint32_t next_number_ = 1;
  Clock host_;  // what the host has waited for
  struct LaneState {
    int device;
    uint32_t ops;
  };
  std::vector<LaneState> lanes_;
  std::map<int, std::vector<uint32_t>> idle_lanes_;  // by device
  OpRef running_;
  std::condition_variable changed_;  // an op is done, or there is one
  uint64_t activity_ = 0;            // calls that submitted or ran something
  int requested_left_ = 0;
  bool hurry_ = false;
};

/// Made by the first call.
Gpu& gpu();
/// The thread runs a function of the host for a stream, which may call nothing.
bool in_host_function();
/// This thread runs an op.
bool runs_here();
/// Names what a wild access of this process touched; a thread that runs ops asks for a stack first.
void install_fault_handler();
void use_signal_stack();

}  // namespace vgpu
