// Collectives as ops: a collective on the dispatch path, so that a trace holds it in its place
// among the others. Results are new tensors, pending until the collective is done; reading one
// waits. Invariant: the op brings its kernel along (Primitive::own_kernel), whose whole work is one
// submit, so nothing is registered with the core. None has a derivative: what the gradient of a
// collective is depends on which ranks hold what, which is known above (redistribute).
#pragma once
#include "collectives/process_group.h"
#include "core/primitive/attributes.h"
#include "core/primitive/primitive.h"

namespace tessera {

/// The reduction of every rank's x [..], on every rank.
Tensor all_reduce(const Tensor& x, const Ref<ProcessGroup>& group, ReduceOp op = ReduceOp::kSum,
                  CallSite site = CallSite::current());
/// t [..] takes the reduction of every rank's t, without a copy.
void all_reduce_(const Tensor& t, const Ref<ProcessGroup>& group, ReduceOp op = ReduceOp::kSum,
                 CallSite site = CallSite::current());
/// x [n, ..] -> [size * n, ..], rank by rank.
Tensor all_gather(const Tensor& x, const Ref<ProcessGroup>& group,
                  CallSite site = CallSite::current());
/// x [size * n, ..] -> [n, ..]: this rank's rows of the reduction.
Tensor reduce_scatter(const Tensor& x, const Ref<ProcessGroup>& group, ReduceOp op = ReduceOp::kSum,
                      CallSite site = CallSite::current());
/// x of `root`, on every rank.
Tensor broadcast(const Tensor& x, const Ref<ProcessGroup>& group, int root,
                 CallSite site = CallSite::current());
/// t takes the values of `root`'s t.
void broadcast_(const Tensor& t, const Ref<ProcessGroup>& group, int root,
                CallSite site = CallSite::current());
/// x [size * n, ..] -> the same shape: rows r * n .. of the result are this rank's rows of rank r.
Tensor all_to_all(const Tensor& x, const Ref<ProcessGroup>& group,
                  CallSite site = CallSite::current());

/// How `extent` indices, each of `row` elements, are cut over the ranks of a group: rank r has
/// those of cut({0, extent}, unit, size, r), which may be fewer than another's or none.
struct Pieces {
  int64_t extent = 0, unit = 1, row = 1;
};
/// x, any shape, this rank's piece -> [extent * row], rank by rank.
Tensor all_gather_v(const Tensor& x, const Ref<ProcessGroup>& group, const Pieces& pieces,
                    CallSite site = CallSite::current());
/// x, extent * row elements -> the elements of this rank's piece of the reduction, 1-d.
Tensor reduce_scatter_v(const Tensor& x, const Ref<ProcessGroup>& group, const Pieces& pieces,
                        ReduceOp op = ReduceOp::kSum, CallSite site = CallSite::current());
/// x, `in` rank by rank: its piece r goes to rank r. The result, 1-d, is `out`: piece r comes from
/// rank r.
Tensor all_to_all_v(const Tensor& x, const Ref<ProcessGroup>& group, const Pieces& in,
                    const Pieces& out, CallSite site = CallSite::current());

/// What the ops above are made of, and those of a program: an op whose kernel (own_kernel) is one
/// submit(). Traces keep such ops in their order and run each exactly once, whoever reads what it
/// gives. It needs no derivative: then whoever asks for one is told that there is none.
class CollectivePrimitive : public Primitive {
 public:
  CollectivePrimitive(const OpInfo& info, Ref<ProcessGroup> group)
      : Primitive(info), group(std::move(group)) {}
  /// True where its result is reduced or sent in the memory in which it lies, as an operand is.
  virtual bool moves_its_result() const { return false; }
  /// False where ranks may have operands of different sizes.
  virtual bool ranks_agree_on_size() const { return true; }
  /// For the kernel: starts `c` on the group; outputs are pending until it is done. `c.async` and
  /// `c.order` are set here.
  void submit(Collective c) const;

  const Ref<ProcessGroup> group;
};

/// True for such ops.
bool is_collective(const Primitive& prim);
/// One of them by name ("all_reduce", "all_gather_v"), with attributes that are still to be given.
/// Throws UserError for a name that none has.
PrimRef collective_op(std::string_view name, const Ref<ProcessGroup>& group);
/// The group of a collective.
ProcessGroup& group_of(const Primitive& prim);
/// True where a collective's result is reduced or sent in the memory in which it lies, as an
/// operand is.
bool moves_its_result(const Primitive& prim);
/// A hash of what the ranks of a collective must agree on: kind, operator, root, and the dtype and
/// counts of its operand.
uint64_t hash_collective(const Primitive& prim, const Meta& operand);

/// While it lives, the first of the ops above that this thread runs on each of these groups
/// announces those that follow.
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
