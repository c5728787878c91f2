#include "collectives/ops.h"

#include <map>

#include "core/dispatch/copy.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/kernel.h"

namespace tessera {
namespace {

void plan_collective(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan);
void run_collective(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out,
                    Workspace, const Stream&);

// A group is no text: attributes name it, and an op is made again on the group that it has.
void check_group(AttributeReader& a, const ProcessGroup& group) {
  TESSERA_CHECK(a.text("group") == group.name(), "attribute group: \"{}\" where {} is at hand",
                a.text("group"), group.name());
}
ReduceOp read_op(AttributeReader& a, ReduceOp otherwise) {
  if (!a.has("op")) return otherwise;
  std::string text = a.text("op");
  for (int i = 0; i < kNumReduceOps; ++i)
    if (name_of(ReduceOp(i)) == text) return ReduceOp(i);
  throw UserError(fmt::format("attribute op: \"{}\" is no reduction", text));
}

// The verbs that are ops, and those of them that have a form over pieces.
using enum CollKind;
constexpr CollKind kWhole[] = {kAllReduce, kAllGather, kReduceScatter, kBroadcast, kAllToAll},
                   kInPieces[] = {kAllGather, kReduceScatter, kAllToAll};

const OpInfo& op_of(CollKind kind, bool pieces) {
  static const auto* ops = [] {
    constexpr OpTraits collective{OpKind::kCollective, Precision::kAsGiven, 1};
    auto* m = new std::map<std::pair<CollKind, bool>, OpInfo>;
    for (CollKind k : kWhole) m->try_emplace({k, false}, name_of(k), collective);
    for (CollKind k : kInPieces)
      m->try_emplace({k, true}, std::string(name_of(k)) + "_v", collective);
    return m;
  }();
  return ops->at({kind, pieces});
}

// The verbs for which NCCL has kernels that read and write windows.
bool in_windows(CollKind kind) {
  return kind == kAllReduce || kind == kAllGather || kind == kReduceScatter;
}
bool in_place_verb(CollKind kind) { return kind == kAllReduce || kind == kBroadcast; }

class CollectiveOp final : public CollectivePrimitive {
 public:
  CollectiveOp(CollKind kind, Ref<ProcessGroup> group, ReduceOp op, int root, CallSite site)
      : CollectivePrimitive(op_of(kind, false), std::move(group)),
        kind(kind),
        op(op),
        root(root),
        site(site) {}

  Metas infer(MetaSpan in) const override {
    const Meta& x = *in[0];
    Shape shape = x.shape;
    int64_t n = group->size();
    bool gathers = kind == CollKind::kAllGather, scatters = kind == CollKind::kReduceScatter;
    if (gathers || scatters || kind == CollKind::kAllToAll) {
      TESSERA_CHECK_AS(ShapeError, shape.size() > 0 && (gathers || shape[0] % n == 0),
                       "{}: {} cannot be cut into rows of {} ranks of {}; pad dim 0", name(),
                       describe(in), n, group->name());
      if (gathers) shape[0] *= n;
      if (scatters) shape[0] /= n;
    }
    return {Meta::contiguous(shape, x.dtype, x.device)};
  }
  const Kernel* own_kernel(DeviceKind) const override {
    static const Kernel kernel{plan_collective, run_collective};
    return &kernel;
  }
  void attributes(AttributeVisitor& v) const override {
    v.text("group", group->name());
    if (tessera::traits(kind).reduces) v.text("op", tessera::name_of(op));
    if (tessera::traits(kind).rooted) v.integer("root", root);
  }
  PrimRef with_attributes(AttributeReader& a) const override {
    check_group(a, *group);
    int64_t from = tessera::traits(kind).rooted ? a.integer("root") : root;
    TESSERA_CHECK(!tessera::traits(kind).rooted || (from >= 0 && from < group->size()),
                  "{}: root {} of {} ranks", name(), from, group->size());
    return PrimRef(new CollectiveOp(kind, group, read_op(a, op), int(from), site));
  }

  bool moves_its_result() const override { return in_place_verb(kind); }
  bool uses_windows() const override { return in_windows(kind); }
  bool captures(std::span<const Tensor> in, std::span<const Tensor> out) const override {
    // The root's copy of a broadcast that is not in place waits for its operand.
    return kind != CollKind::kBroadcast &&
           group->captures({.kind = kind, .op = op, .in = in, .out = out});
  }

  const CollKind kind;
  const ReduceOp op;
  const int root;
  const CallSite site;  // where the program calls it; compared between ranks, not an attribute
};

thread_local CallOrderScope::List* announcing = nullptr;
thread_local SubmittedScope* keeping = nullptr;

// Takes the list that the next call on `group` announces; it is announced once.
Ref<const CallOrder> order_on(const ProcessGroup& group) {
  if (announcing)
    for (auto& [on, announcement] : *announcing)
      if (on == &group) return std::exchange(announcement, nullptr);
  return nullptr;
}

void plan_collective(const Primitive& prim, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.dense_in = 1;
  plan.in_place = in_place_verb(static_cast<const CollectiveOp&>(prim).kind);
}

void run_collective(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                    Workspace, const Stream&) {
  const auto& p = static_cast<const CollectiveOp&>(prim);
  Tensor x = in[0];
  // The group broadcasts within one tensor, so the root copies its values there first.
  if (p.kind == CollKind::kBroadcast && x.device_data() != out[0].device_data()) {
    if (p.group->rank() == p.root) copy_values(out[0], x);
    x = out[0];
  }
  p.submit({.kind = p.kind,
            .op = p.op,
            .peer = traits(p.kind).rooted ? p.root : -1,
            .in = {&x, 1},
            .out = out,
            .site = p.site});
}

// The verbs over pieces that may differ between ranks: operand and result are flat buffers.
class PiecesOp final : public CollectivePrimitive {
 public:
  PiecesOp(CollKind kind, Ref<ProcessGroup> group, ReduceOp op, const Pieces& in, const Pieces& out,
           CallSite site)
      : CollectivePrimitive(op_of(kind, true), std::move(group)),
        kind(kind),
        op(op),
        in(in),
        out(out),
        site(site) {
    for (const Pieces* p : {&in, &out})
      TESSERA_CHECK_AS(ShapeError, p->unit > 0 && p->extent % p->unit == 0 && p->row >= 0,
                       "{}: {} indices of {} elements cannot be cut in units of {}", name(),
                       p->extent, p->row, p->unit);
  }

  int64_t count(const Pieces& p, int rank) const {
    return cut({0, p.extent, p.extent}, p.unit, group->size(), rank).size * p.row;
  }
  Metas infer(MetaSpan operands) const override {
    const Meta& x = *operands[0];
    int64_t whole_in = in.extent * in.row, whole_out = out.extent * out.row, mine_in = whole_in;
    int64_t result = kind == CollKind::kReduceScatter ? count(out, group->rank()) : whole_out;
    if (kind == CollKind::kAllGather) mine_in = count(in, group->rank());
    TESSERA_CHECK_AS(ShapeError, numel(x.shape) == mine_in, "{}: {} where {} elements are expected",
                     name(), describe(operands), mine_in);
    return {Meta::contiguous({result}, x.dtype, x.device)};
  }
  const Kernel* own_kernel(DeviceKind) const override;
  void attributes(AttributeVisitor& v) const override {
    v.text("group", group->name());
    if (kind == CollKind::kReduceScatter) v.text("op", tessera::name_of(op));
    v.dims("in", Dims{in.extent, in.unit, in.row}),
        v.dims("out", Dims{out.extent, out.unit, out.row});
  }
  PrimRef with_attributes(AttributeReader& a) const override {
    check_group(a, *group);
    auto pieces = [&](std::string_view side) {
      Dims d = a.numbers(side);
      TESSERA_CHECK(d.size() == 3, "{}: {} is extent, unit and row, not {}", name(), side,
                    tessera::to_string(d));
      return Pieces{d[0], d[1], d[2]};
    };
    return PrimRef(new PiecesOp(kind, group, read_op(a, op), pieces("in"), pieces("out"), site));
  }

  // Sizes may differ between ranks; how the whole is divided is an attribute.
  bool ranks_agree_on_size() const override { return false; }
  bool uses_windows() const override {
    return in_windows(kind) && count(in, 0) == count(in, group->size() - 1) &&
           count(out, 0) == count(out, group->size() - 1);
  }
  bool captures(std::span<const Tensor> in, std::span<const Tensor> out) const override {
    return group->captures({.kind = kind, .op = op, .in = in, .out = out});
  }

  const CollKind kind;
  const ReduceOp op;
  const Pieces in, out;
  const CallSite site;
};

// Returns views of `flat`, one for each rank.
std::vector<Tensor> pieces_of(const Tensor& flat, const PiecesOp& p, const Pieces& pieces) {
  std::vector<Tensor> views;
  int64_t offset = flat.offset();
  for (int r = 0; r < p.group->size(); ++r) {
    int64_t n = p.count(pieces, r);
    views.emplace_back(Meta::contiguous({n}, flat.dtype(), flat.device()), flat.storage(), offset);
    offset += n;
  }
  return views;
}

void run_pieces(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                Workspace, const Stream&) {
  const auto& p = static_cast<const PiecesOp&>(prim);
  std::vector<Tensor> give{in[0]}, take{out[0]};
  if (p.kind != CollKind::kAllGather) give = pieces_of(in[0], p, p.in);
  if (p.kind != CollKind::kReduceScatter) take = pieces_of(out[0], p, p.out);
  p.submit({.kind = p.kind, .op = p.op, .in = give, .out = take, .site = p.site});
}

const Kernel* PiecesOp::own_kernel(DeviceKind) const {
  static const Kernel kernel{[](const Primitive&, std::span<const Tensor>, std::span<Meta>,
                                Plan& plan) { plan.dense_in = 1; },
                             run_pieces};
  return &kernel;
}

PrimRef make(CollKind kind, const Ref<ProcessGroup>& group, ReduceOp op, int root, CallSite site) {
  TESSERA_CHECK(group, "{}: no group; pass world_group() or one that was split from it",
                name_of(kind));
  TESSERA_CHECK(root < group->size(), "{}: root {} of {} ranks of {}", name_of(kind), root,
                group->size(), group->name());
  return PrimRef(new CollectiveOp(kind, group, op, root, site));
}

Tensor run(const PrimRef& prim, const Tensor& x) { return dispatch1(prim, operands(Tensor(x))); }
void run_into(const PrimRef& prim, const Tensor& t) { assign({&t, 1}, prim, operands(Tensor(t))); }

}  // namespace

Tensor all_reduce(const Tensor& x, const Ref<ProcessGroup>& group, ReduceOp op, CallSite site) {
  return run(make(CollKind::kAllReduce, group, op, 0, site), x);
}
void all_reduce_(const Tensor& t, const Ref<ProcessGroup>& group, ReduceOp op, CallSite site) {
  run_into(make(CollKind::kAllReduce, group, op, 0, site), t);
}
Tensor all_gather(const Tensor& x, const Ref<ProcessGroup>& group, CallSite site) {
  return run(make(CollKind::kAllGather, group, ReduceOp::kSum, 0, site), x);
}
Tensor reduce_scatter(const Tensor& x, const Ref<ProcessGroup>& group, ReduceOp op, CallSite site) {
  return run(make(CollKind::kReduceScatter, group, op, 0, site), x);
}
Tensor broadcast(const Tensor& x, const Ref<ProcessGroup>& group, int root, CallSite site) {
  return run(make(CollKind::kBroadcast, group, ReduceOp::kSum, root, site), x);
}
void broadcast_(const Tensor& t, const Ref<ProcessGroup>& group, int root, CallSite site) {
  run_into(make(CollKind::kBroadcast, group, ReduceOp::kSum, root, site), t);
}
Tensor all_to_all(const Tensor& x, const Ref<ProcessGroup>& group, CallSite site) {
  return run(make(CollKind::kAllToAll, group, ReduceOp::kSum, 0, site), x);
}

Tensor all_gather_v(const Tensor& x, const Ref<ProcessGroup>& group, const Pieces& pieces,
                    CallSite site) {
  return run(
      PrimRef(new PiecesOp(CollKind::kAllGather, group, ReduceOp::kSum, pieces, pieces, site)), x);
}
Tensor reduce_scatter_v(const Tensor& x, const Ref<ProcessGroup>& group, const Pieces& pieces,
                        ReduceOp op, CallSite site) {
  return run(PrimRef(new PiecesOp(CollKind::kReduceScatter, group, op, pieces, pieces, site)), x);
}
Tensor all_to_all_v(const Tensor& x, const Ref<ProcessGroup>& group, const Pieces& in,
                    const Pieces& out, CallSite site) {
  return run(PrimRef(new PiecesOp(CollKind::kAllToAll, group, ReduceOp::kSum, in, out, site)), x);
}

bool is_collective(const Primitive& prim) { return prim.traits().kind == OpKind::kCollective; }

void CollectivePrimitive::submit(Collective c) const {
  c.async = true;
  c.order = order_on(*group);
  Ref<Work> work = group->submit(c);
  if (keeping) keeping->works_.push_back(std::move(work));
}

PrimRef collective_op(std::string_view name, const Ref<ProcessGroup>& group) {
  const CallSite site = CallSite::current();
  for (CollKind kind : kWhole)
    if (name == op_of(kind, false).name) return make(kind, group, ReduceOp::kSum, 0, site);
  for (CollKind kind : kInPieces)
    if (name == op_of(kind, true).name)
      return PrimRef(new PiecesOp(kind, group, ReduceOp::kSum, {}, {}, site));
  throw UserError(fmt::format("there is no collective {}", name));
}

namespace {

const CollectivePrimitive& collective(const Primitive& prim) {
  auto* p = dynamic_cast<const CollectivePrimitive*>(&prim);
  TESSERA_ASSERT(p, "{} is no collective", prim.name());
  return *p;
}

}  // namespace

ProcessGroup& group_of(const Primitive& prim) { return *collective(prim).group; }
bool moves_its_result(const Primitive& prim) { return collective(prim).moves_its_result(); }

bool captures(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out) {
  return collective(prim).captures(in, out);
}

bool uses_windows(const Primitive& prim) { return collective(prim).uses_windows(); }

uint64_t hash_collective(const Primitive& prim, const Meta& operand) {
  uint64_t text = std::hash<std::string>()(to_string(prim));
  return (text ^ uint64_t(operand.dtype)) * 0x9e3779b97f4a7c15ull +
         (collective(prim).ranks_agree_on_size() ? uint64_t(numel(operand.shape)) : 0);
}

CallOrderScope::CallOrderScope(List list) : before_(announcing), list_(std::move(list)) {
  announcing = &list_;
}
CallOrderScope::~CallOrderScope() { announcing = before_; }

SubmittedScope::SubmittedScope() : before_(keeping) { keeping = this; }
SubmittedScope::~SubmittedScope() { keeping = before_; }

}  // namespace tessera
