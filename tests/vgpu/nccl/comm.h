// Communicators of the virtual NCCL and what runs on them. Work is an op of the virtual GPU that is
// polled until all ranks have come to it, so streams of the process that it does not order go on.
// Sums begin with another rank in each part of a tensor and round 16-bit values at each term; a
// send ends when the receiver has all. Where ranks differ it hangs, as a card would. It refuses two
// ranks on one device, windows in different orders, a collective whose memory lies in windows on
// some ranks only or in other places of them, one that only some ranks launch by a graph or that
// they captured at different times, memory that is freed while it is registered or is registered at
// the end, a call while another is in progress, the end of a capture while a call is in progress,
// fp8, one communicator on two streams in a group, and calls of one communicator that no event
// orders. The end of a communicator waits until graphs that have calls of it are destroyed, as that
// of NCCL 2.26 and newer does. Invariant: all of this is used under the mutex of the virtual GPU.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/vgpu/cuda/api.h"
#include "tests/vgpu/nccl/arithmetic.h"
#include "tests/vgpu/nccl/segment.h"

namespace tessera::nccl {
struct WindowObject;
}

namespace vgpu::nccl {

using namespace tessera::nccl;  // NOLINT: the fake is the vendor's side of these names
using Result = tessera::nccl::Result;

/// VGPU_NCCL=ITEM[,ITEM]: hang:RANK:NTH (the communication of that number, counted from 1 in each
/// communicator, never begins on that rank), error:RANK:NTH[:CODE] (nor does this, and the
/// communicator has an asynchronous error), refuse:CALL[:NTH[:CODE]] (NTH 0: each), report (a line
/// on stderr where ranks make calls that differ, which otherwise only hang).
struct Requests {
  int hang_rank = -1, error_rank = -1;
  uint64_t hang_nth = 0, error_nth = 0;
  Result error_code = Result::kRemoteError;
  struct Refusal {
    std::string call;
    uint64_t nth;
    Result code;
  };
  std::vector<Refusal> refusals;
  bool report = false;
};
Requests& requests();

enum class Verb : int32_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter
};

struct Communicator {
  int rank = 0, size = 1, device = 0;
  bool blocking = true, aborted = false, finalized = false;
  std::shared_ptr<Segment> segment;
  /// What the host set in motion and asks about; its result, once there is one.
  std::function<std::optional<Result>()> job;
  Result state = Result::kSuccess;
  Result broken = Result::kSuccess;  // an error of its work, which stays
  /// Work of a communicator that does not block: it is submitted a while after the call.
  std::function<void()> unlaunched;
  int asked = 0;  // since that call
  uint64_t notes = 0, calls = 0, rounds = 0;
  uint64_t launches = 0, finished = 0;  // ops, which run in this order
  int graphs = 0;                       // nodes of graphs that were not destroyed
  int32_t captured = 0;                 // nodes of graphs that were launched
  OpRef last;
  uint32_t last_lane = 0, last_time = 0;  // of the op that began last; 0: none has
  std::map<int, Reduction> operators;     // by number
  std::set<const WindowObject*> registered;
  uint64_t windows = 0;  // that were registered so far

  /// Tells the other ranks four numbers; false until all have told theirs. `k` is the number of the
  /// exchange, by take_note.
  bool exchange(uint64_t k, const int64_t (&mine)[4]) const;
  const int64_t* note_of(int r, uint64_t k) const { return segment->rank(r).note[k % 2]; }
  uint64_t take_note() { return notes++; }
  /// What is registered and has all of the bytes, or some of them; null: nothing.
  const WindowObject* window_with(const void* at, size_t bytes, bool all) const;
  /// Asks after what is in progress.
  Result ask();
};
using CommRef = std::shared_ptr<Communicator>;

/// A part of an op.
class Task {
 public:
  virtual ~Task() = default;
  /// Says what memory it uses.
  virtual void begin() = 0;
  /// True when it is done; goes on as far as peers let it otherwise.
  virtual bool step() = 0;
  /// The same for a launch of a graph; `captured`: the number of the node in the communicator.
  virtual std::unique_ptr<Task> again(int32_t captured) const = 0;
  /// The channel of a message; null for a collective.
  virtual const Channel* channel() const { return nullptr; }
  std::string name;
};
struct CollectiveCall {
  Verb verb;
  const void* in;
  void* out;
  size_t count;
  DataType type;
  RedOp op = RedOp::kSum;
  int root = 0;
};
std::unique_ptr<Task> make_collective(const CommRef& comm, const CollectiveCall& call);
std::unique_ptr<Task> make_message(const CommRef& comm, bool sends, void* at, size_t bytes,
                                   int peer);
using Tasks = std::vector<std::unique_ptr<Task>>;
/// Submits the tasks as one op, or records them where the stream is captured.
void launch(const CommRef& comm, StreamObject& stream, Tasks tasks);

/// The communicator of a handle, ready for another call; says why not otherwise.
Result find_ready(const char* call, Comm comm, CommRef* found);
Result refuse(Result result, const char* call, const std::string& why);
/// Whether a communicator has the byte in what is registered.
bool is_registered(const void* at);
/// Waits until the job of `comm` is done, or comes back at once where it does not block.
Result finish_job(const CommRef& comm, std::unique_lock<std::mutex>& lock);

template <class F>
Result in_nccl(const char* call, F&& body) {
  if (in_host_function())
    return refuse(Result::kInvalidUsage, call, "in a function of the host that a stream runs");
  std::unique_lock lock(gpu().mutex);
  const uint64_t nth = ++gpu().calls[call];
  for (const Requests::Refusal& r : requests().refusals)
    if (r.call == call && (r.nth == 0 || r.nth == nth)) return r.code;
  return body(lock);
}

}  // namespace vgpu::nccl

namespace tessera::nccl {
struct CommObject {
  vgpu::nccl::CommRef comm;
};
struct WindowObject {
  const void* at;
  size_t bytes;
  uint64_t number;  // among those of its communicator, from 1
};
}  // namespace tessera::nccl
