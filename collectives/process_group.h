// Process groups and their collectives. A collective is a value: every verb fills one Collective
// and passes it to one virtual function, submit. Backends (shared memory, TCP, one rank) and
// decorators (fault injection, counting, logging) implement only that function. Invariants: the
// ranks of a group make the same calls in the same order, which is checked before any data moves;
// every wait has a deadline and its error names the absent ranks; after an error the group is dead
// and every later call throws that first error again.
#pragma once
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <source_location>
#include <span>
#include <string>
#include <string_view>

#include "collectives/call_order.h"
#include "core/base/error.h"
#include "core/tensor/tensor.h"

namespace tessera {

using Millis = std::chrono::milliseconds;
using CallSite = std::source_location;

enum class CollKind : uint8_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kBarrier,
  kSend,
  kRecv
};
inline constexpr int kNumCollKinds = 11;
/// The properties of a kind of collective, one row of the table in verbs.cpp.
struct CollTraits {
  std::string_view name;
  bool reduces = false;  // combines with `op`
  bool rooted = false;   // `peer` is the root
  bool p2p = false;      // `peer` is the other rank
};
const CollTraits& traits(CollKind kind);
/// "all_reduce", "send", ...
std::string_view name_of(CollKind kind);
/// Parses what name_of prints; throws UserError naming the text.
CollKind parse_coll_kind(std::string_view name);

/// kAvg needs a floating dtype, the bitwise operators an integer or bool. On bools a sum is "any"
/// and a product is "all". 16-bit floats are combined in f32 and rounded once.
enum class ReduceOp : uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBitAnd, kBitOr, kBitXor };
inline constexpr int kNumReduceOps = 8;
std::string_view name_of(ReduceOp op);

/// One call of one rank. Spans are borrowed while submit runs; tensors are row-major, dense, and of
/// one dtype and device.
struct Collective {
  CollKind kind = CollKind::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  int peer = -1;                             // root, or the other rank of send and recv
  std::span<const Tensor> in = {};           // one tensor, or one for each rank
  std::span<const Tensor> out = {};          // one tensor, or one for each rank
  std::span<const int64_t> in_splits = {};   // all_to_all of one tensor: elements for each rank;
  std::span<const int64_t> out_splits = {};  // elements from each rank; empty: even
  Millis timeout{0};                         // 0: the group's
  bool async = false;                        // false: submit returns when it is done
  CallSite site = CallSite::current();
  // The calls that will follow on this group, this one included; null: they are not known.
  Ref<const CallOrder> order = nullptr;
};

/// A submitted collective. Its outputs have it as their ready event, and reading an output waits
/// for it, so most programs never see one.
class Work : public Event {
 public:
  /// Waits until the collective is done, at most until its own deadline; throws the error it failed
  /// with.
  void wait() override = 0;
  /// Waits at most `timeout`; false when the collective is still in progress. Throws what wait()
  /// throws.
  virtual bool wait_for(Millis timeout) = 0;
  /// The error it failed with; null while it is in progress or after success.
  virtual std::exception_ptr error() const = 0;
  /// Number of the collective within its group.
  virtual uint64_t seq() const = 0;
  /// How long an asynchronous collective was executing, waits for peers included; 0 until it is
  /// done.
  virtual double elapsed_ms() const = 0;
};

/// The ranks that call collectives together. All verbs take dense tensors. They throw UserError or
/// ShapeError for arguments that cannot work (before any peer is told), and CommError when a peer
/// died, was absent at the deadline or made a different call. The call site counts: ranks that make
/// one call in different branches must share one line, or pass `site` (one constant for all of
/// them). Reductions are summed in a fixed order, the balanced tree ((r0+r1)+(r2+r3))+..., whatever
/// the backend and the message size, so results have equal bits. A synchronous verb returns when
/// this rank's results are there. A verb ending in _async returns at once; its outputs are pending
/// (their storage has a ready event), and its inputs must not be changed until it is done. Calls on
/// one group are executed in the order of submission. Where a rank has one CPU, the thread that
/// waits for a call executes it, or another thread does 20 ms after it was submitted. For tensors
/// on cards that NCCL moves, sums are in NCCL's order, and a synchronous verb returns at once: what
/// is enqueued after it has its results.
class ProcessGroup : public RefCounted {
 public:
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;
  /// "shm", "loopback", "gloo", "mpi" or "solo": the backend that moves tensors on `device`.
  /// "nccl" for cards, from the first collective on them, if that decided for it.
  virtual std::string_view backend(Device device = {}) const = 0;
  /// True when submit would accept the kind, operator, dtype and device of `c`.
  virtual bool supports(const Collective& c) const = 0;
  /// True when submit() of `c` may be called while the calling thread captures what it enqueues
  /// (DeviceRuntime::capture). Each launch of the graph then makes the call again, and the result
  /// of submit() is good for Work::wait_on alone, on the stream that captures: tensors get no
  /// events.
  virtual bool captures(const Collective& /*c*/) const { return false; }
  /// Submits a collective; all verbs end here. The result is never null; a synchronous call returns
  /// a Work that is done.
  virtual Ref<Work> submit(const Collective& c) = 0;
  /// Makes a new group of the ranks with equal `color`, ordered by `key` and then by rank in this
  /// group. All ranks of this group must call it; a negative color gets null.
  virtual Ref<ProcessGroup> split(int color, int key = 0, CallSite site = CallSite::current()) = 0;
  /// Makes a new group of these ranks of this group, numbered in the order given; null on the
  /// others. All ranks of this group must call it with the same list. Throws UserError for a rank
  /// that does not exist or is named twice.
  Ref<ProcessGroup> new_group(std::span<const int> ranks, CallSite site = CallSite::current());
  Ref<ProcessGroup> new_group(std::initializer_list<int> ranks,
                              CallSite site = CallSite::current()) {
    return new_group(std::span<const int>(ranks.begin(), ranks.size()), site);
  }
  /// Kills the group: calls in progress or yet to come, on every rank, throw CommError with `why`.
  virtual void abort(const std::string& why) = 0;
  /// Waits until everything submitted by this rank is done; throws the group's error, if any.
  virtual void flush() = 0;
  /// Allocates memory on `device` for tensors that are reduced often (gradient buckets). Where the
  /// backend can, it is shared with the peers, so that nothing is copied in; otherwise it is
  /// ordinary memory. Any rank may call it; on cards, where has_own_memory(), all ranks do, with
  /// equal sizes, in the order of other calls.
  virtual Ref<Storage> allocate(size_t bytes, Device device = {}) = 0;
  /// True when allocate() returns memory of the group's own, not ordinary memory; tensors that are
  /// sent should then be allocated by it.
  virtual bool has_own_memory(Device device = {}) const = 0;
  /// The rank in the world of this group's rank `r`.
  virtual int global_rank(int r) const = 0;
  /// The deadline of calls that specify none.
  virtual Millis timeout() const = 0;
  /// Says that this rank is busy with something that its peers may have to wait for in this group,
  /// such as "writing step 20", and that it made progress: each call restarts their deadlines. ""
  /// ends it.
  virtual void working(std::string_view what) = 0;

  // t: [..], reduced in place; every rank gets the result.
  void all_reduce(const Tensor& t, ReduceOp op = ReduceOp::kSum, Millis timeout = {},
                  CallSite site = CallSite::current());
  Ref<Work> all_reduce_async(const Tensor& t, ReduceOp op = ReduceOp::kSum, Millis timeout = {},
                             CallSite site = CallSite::current());
  // t: [..], reduced in place on `root`; unchanged elsewhere.
  void reduce(const Tensor& t, int root, ReduceOp op = ReduceOp::kSum, Millis timeout = {},
              CallSite site = CallSite::current());
  Ref<Work> reduce_async(const Tensor& t, int root, ReduceOp op = ReduceOp::kSum,
                         Millis timeout = {}, CallSite site = CallSite::current());
  // t: [..], overwritten with the values of `root`.
  void broadcast(const Tensor& t, int root, Millis timeout = {},
                 CallSite site = CallSite::current());
  Ref<Work> broadcast_async(const Tensor& t, int root, Millis timeout = {},
                            CallSite site = CallSite::current());
  // in: n elements; out: size() * n elements, rank by rank.
  void all_gather(const Tensor& out, const Tensor& in, Millis timeout = {},
                  CallSite site = CallSite::current());
  Ref<Work> all_gather_async(const Tensor& out, const Tensor& in, Millis timeout = {},
                             CallSite site = CallSite::current());
  // out: one tensor for each rank, of that rank's numel (which may differ from rank to rank).
  void all_gather(std::span<const Tensor> out, const Tensor& in, Millis timeout = {},
                  CallSite site = CallSite::current());
  Ref<Work> all_gather_async(std::span<const Tensor> out, const Tensor& in, Millis timeout = {},
                             CallSite site = CallSite::current());
  // in: n elements; out on `root`: one tensor of size() * n elements or size() of n; empty
  // elsewhere.
  void gather(std::span<const Tensor> out, const Tensor& in, int root, Millis timeout = {},
              CallSite site = CallSite::current());
  Ref<Work> gather_async(std::span<const Tensor> out, const Tensor& in, int root,
                         Millis timeout = {}, CallSite site = CallSite::current());
  // in on `root`: one tensor of size() * n elements or size() of n; empty elsewhere. out: n.
  void scatter(const Tensor& out, std::span<const Tensor> in, int root, Millis timeout = {},
               CallSite site = CallSite::current());
  Ref<Work> scatter_async(const Tensor& out, std::span<const Tensor> in, int root,
                          Millis timeout = {}, CallSite site = CallSite::current());
  // in: size() * n elements; out: n, the reduction of piece number rank() of all ranks.
  void reduce_scatter(const Tensor& out, const Tensor& in, ReduceOp op = ReduceOp::kSum,
                      Millis timeout = {}, CallSite site = CallSite::current());
  Ref<Work> reduce_scatter_async(const Tensor& out, const Tensor& in, ReduceOp op = ReduceOp::kSum,
                                 Millis timeout = {}, CallSite site = CallSite::current());
  // in: one tensor for each rank, with as many elements as that rank's out (which may differ).
  void reduce_scatter(const Tensor& out, std::span<const Tensor> in, ReduceOp op = ReduceOp::kSum,
                      Millis timeout = {}, CallSite site = CallSite::current());
  Ref<Work> reduce_scatter_async(const Tensor& out, std::span<const Tensor> in,
                                 ReduceOp op = ReduceOp::kSum, Millis timeout = {},
                                 CallSite site = CallSite::current());
  // in, out: size() * n elements; piece j of in goes to rank j.
  void all_to_all(const Tensor& out, const Tensor& in, Millis timeout = {},
                  CallSite site = CallSite::current());
  Ref<Work> all_to_all_async(const Tensor& out, const Tensor& in, Millis timeout = {},
                             CallSite site = CallSite::current());
  // in_splits[j] elements of `in` go to rank j, out_splits[j] elements of `out` come from rank j.
  void all_to_all(const Tensor& out, const Tensor& in, std::span<const int64_t> out_splits,
                  std::span<const int64_t> in_splits, Millis timeout = {},
                  CallSite site = CallSite::current());
  Ref<Work> all_to_all_async(const Tensor& out, const Tensor& in,
                             std::span<const int64_t> out_splits,
                             std::span<const int64_t> in_splits, Millis timeout = {},
                             CallSite site = CallSite::current());
  // in, out: one tensor for each rank.
  void all_to_all(std::span<const Tensor> out, std::span<const Tensor> in, Millis timeout = {},
                  CallSite site = CallSite::current());
  Ref<Work> all_to_all_async(std::span<const Tensor> out, std::span<const Tensor> in,
                             Millis timeout = {}, CallSite site = CallSite::current());
  /// Returns when every rank has called it.
  void barrier(Millis timeout = {}, CallSite site = CallSite::current());
  Ref<Work> barrier_async(Millis timeout = {}, CallSite site = CallSite::current());
  /// `send` returns when rank `to` has taken the values (a rendezvous), `recv` when they are there.
  /// Successive asynchronous sends and receives of a rank proceed together, so two ranks may both
  /// send_async and then recv, but not with the same tensor, which could be overwritten before it
  /// is sent.
  void send(const Tensor& t, int to, Millis timeout = {}, CallSite site = CallSite::current());
  Ref<Work> send_async(const Tensor& t, int to, Millis timeout = {},
                       CallSite site = CallSite::current());
  void recv(const Tensor& t, int from, Millis timeout = {}, CallSite site = CallSite::current());
  Ref<Work> recv_async(const Tensor& t, int from, Millis timeout = {},
                       CallSite site = CallSite::current());
};

class Store;

struct GroupOptions {
  int rank = -1;  // -1: this and the others are read from the environment that tlaunch sets
  int world_size = -1;
  std::shared_ptr<Store> store = nullptr;  // null: the job's
  std::string backend;  // "", "shm", "gloo" or "mpi"; "": TESSERA_BACKEND or chosen by host
  // The deadline of joining and of each collective. 0: TESSERA_JOIN_TIMEOUT and TESSERA_TIMEOUT
  // seconds (600 and 60 where they are unset).
  Millis timeout{0};
  std::string name = "world";
};

/// Joins the job, makes its group the calling thread's world() and returns it. In a job of one rank
/// there is no store and no peer, and every verb works. Throws UserError and CommError.
Ref<ProcessGroup> init_process_group(const GroupOptions& options = {});
/// Returns the calling thread's group of all ranks; other threads have none until they call
/// set_world. A program of one rank need not call init_process_group. Throws UserError when the job
/// has more ranks and this thread has no world.
ProcessGroup& world();
/// Returns world() as a reference to keep.
Ref<ProcessGroup> world_group();
/// These return world().rank() and world().size().
int get_rank();
int get_world_size();
/// Makes a group of the calling rank alone, whatever world there is; no other rank takes part.
Ref<ProcessGroup> solo_group();
/// Sets the calling thread's world; null removes it.
void set_world(Ref<ProcessGroup> group);
/// Waits for calls in progress and removes the calling thread's world. A program that caught a
/// CommError can use it to clean up: the failure of a dead group is logged as an error, not thrown.
void destroy_process_group();

}  // namespace tessera
