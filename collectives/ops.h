// Collectives as ops: they are dispatched like other ops, so a trace records them in their order.
// Results are new tensors, pending until the collective is done; reading one waits. Invariant: each
// op has its own kernel (Primitive::own_kernel), which does nothing but submit the collective, so
// nothing is registered with the core. None has a derivative: what the gradient of a collective is
// depends on which ranks hold what, which only the layer above knows (redistribute).
#pragma once
#include <utility>
#include <vector>

#include "collectives/process_group.h"
#include "core/primitive/attributes.h"
#include "core/primitive/primitive.h"

namespace tessera {

/// Returns the reduction of every rank's x [..] on every rank.
Tensor all_reduce(const Tensor& x, const Ref<ProcessGroup>& group, ReduceOp op = ReduceOp::kSum,
                  CallSite site = CallSite::current());
/// Overwrites t [..] with the reduction of every rank's t, without a copy.
void all_reduce_(const Tensor& t, const Ref<ProcessGroup>& group, ReduceOp op = ReduceOp::kSum,
                 CallSite site = CallSite::current());
/// x [n, ..] -> [size * n, ..], rank by rank.
Tensor all_gather(const Tensor& x, const Ref<ProcessGroup>& group,
                  CallSite site = CallSite::current());
/// x [size * n, ..] -> [n, ..]: this rank's rows of the reduction over ranks.
Tensor reduce_scatter(const Tensor& x, const Ref<ProcessGroup>& group, ReduceOp op = ReduceOp::kSum,
                      CallSite site = CallSite::current());
/// Returns the x of rank `root` on every rank.
Tensor broadcast(const Tensor& x, const Ref<ProcessGroup>& group, int root,
                 CallSite site = CallSite::current());
/// Overwrites t with the values of the t of rank `root`.
void broadcast_(const Tensor& t, const Ref<ProcessGroup>& group, int root,
                CallSite site = CallSite::current());
/// x [size * n, ..] -> the same shape: rows r * n .. of the result are the rows that rank r has for
/// this rank.
Tensor all_to_all(const Tensor& x, const Ref<ProcessGroup>& group,
                  CallSite site = CallSite::current());

/// Divides `extent` indices, each of `row` elements, among the ranks of a group: rank r has the
/// indices cut({0, extent}, unit, size, r), which may be fewer than another rank has, or none.
struct Pieces {
  int64_t extent = 0, unit = 1, row = 1;
};
/// x, this rank's piece in any shape -> [extent * row], rank by rank.
Tensor all_gather_v(const Tensor& x, const Ref<ProcessGroup>& group, const Pieces& pieces,
                    CallSite site = CallSite::current());
/// x, extent * row elements -> the elements of this rank's piece of the reduction over ranks, 1-d.
Tensor reduce_scatter_v(const Tensor& x, const Ref<ProcessGroup>& group, const Pieces& pieces,
                        ReduceOp op = ReduceOp::kSum, CallSite site = CallSite::current());
/// x is divided by `in`; its piece r goes to rank r. The result, 1-d, is divided by `out`; its
/// piece r comes from rank r.
Tensor all_to_all_v(const Tensor& x, const Ref<ProcessGroup>& group, const Pieces& in,
                    const Pieces& out, CallSite site = CallSite::current());

/// The base of the ops above and of a program's own collectives: an op whose kernel (own_kernel) is
/// one submit(). Traces keep such ops in their order and run each exactly once, whether or not its
/// result is read. It needs no derivative; asking for one is then an error that says so.
class CollectivePrimitive : public Primitive {
 public:
  CollectivePrimitive(const OpInfo& info, Ref<ProcessGroup> group)
      : Primitive(info), group(std::move(group)) {}
  /// True where the result, like an operand, is reduced or sent in the memory in which it lies.
  virtual bool moves_its_result() const { return false; }
  /// Whether operands and results on a device should lie in the group's own memory there, at the
  /// same place on all ranks.
  virtual bool uses_windows() const { return false; }
  /// Whether the kernel may run while the calling thread captures what it enqueues, as
  /// ProcessGroup::captures.
  virtual bool captures(std::span<const Tensor> /*in*/, std::span<const Tensor> /*out*/) const {
    return false;
  }
  /// False where ranks may have operands of different sizes.
  virtual bool ranks_agree_on_size() const { return true; }
  /// Called by the kernel: starts `c` on the group; outputs are pending until it is done. Sets
  /// `c.async` and `c.order`.
  void submit(Collective c) const;

  const Ref<ProcessGroup> group;
};

/// True for a CollectivePrimitive.
bool is_collective(const Primitive& prim);
/// Makes a collective op by name ("all_reduce", "all_gather_v"); its attributes are still to be
/// set. Throws UserError for an unknown name.
PrimRef collective_op(std::string_view name, const Ref<ProcessGroup>& group);
/// The group of a collective.
ProcessGroup& group_of(const Primitive& prim);
/// See CollectivePrimitive::moves_its_result.
bool moves_its_result(const Primitive& prim);
/// See CollectivePrimitive::uses_windows.
bool uses_windows(const Primitive& prim);
/// See CollectivePrimitive::captures.
bool captures(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out);
/// Hashes what the ranks of a collective must agree on: kind, operator, root, and the dtype and
/// counts of its operand.
uint64_t hash_collective(const Primitive& prim, const Meta& operand);

/// While this object lives, it keeps what the collective ops of this thread submit.
class SubmittedScope {
 public:
  SubmittedScope();
  ~SubmittedScope();
  SubmittedScope(const SubmittedScope&) = delete;
  SubmittedScope& operator=(const SubmittedScope&) = delete;
  /// What was submitted since the last call.
  std::vector<Ref<Work>> take() { return std::exchange(works_, {}); }

 private:
  friend class CollectivePrimitive;
  SubmittedScope* const before_;
  std::vector<Ref<Work>> works_;
};

/// While this object lives, the first collective op that this thread runs on each of these groups
/// announces the list of those that follow.
class CallOrderScope {
 public:
  using List = std::vector<std::pair<const ProcessGroup*, Ref<const CallOrder>>>;
  explicit CallOrderScope(List list);
  ~CallOrderScope();
  CallOrderScope(const CallOrderScope&) = delete;
  CallOrderScope& operator=(const CallOrderScope&) = delete;

 private:
  List* const before_;
  List list_;
};

}  // namespace tessera
