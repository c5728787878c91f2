// The sharding layer: it converts operands as the decision requires, runs this rank's op on the
// pieces, and wraps the results.
#include "dtensor/shard_spec.h"

#include "core/autograd/autograd.h"
#include "core/base/log.h"
#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/ops/create.h"
#include "core/ops/views.h"
#include "core/primitive/attributes.h"
#include "core/tensor/wrapped.h"
#include "dtensor/dtensor.h"
#include "dtensor/mesh_state.h"

namespace tessera {
namespace {

// Throws unless a plain operand is certain, or promised, to be the same on every rank.
void check_plain(const Primitive& prim, size_t i, const Tensor& t) {
  bool promised = context().replicate_plain || context().phase == Phase::kBackward;
  TESSERA_CHECK_AS(ShardingError, t.ndim() == 0 || promised,
                   "{}: operand {} ({}) is a plain tensor among sharded ones. distribute() it, or "
                   "say with a ReplicatePlain scope that it is the same on every rank",
                   prim.name(), i, describe(t));
}

const DeviceMesh& common_mesh(const Primitive& prim, Inputs in) {
  const DeviceMesh* mesh = nullptr;
  for (size_t i = 0; i < in.size(); ++i) {
    const ShardSpec* s = spec_of(in[i]);
    if (!s) {
      check_plain(prim, i, in[i]);
    } else if (!mesh) {
      mesh = &s->mesh;
    } else {
      TESSERA_CHECK_AS(ShardingError, *mesh == s->mesh,
                       "{}: operands lie over different meshes, ({}) and ({})", prim.name(),
                       mesh->to_string(), s->mesh.to_string());
    }
  }
  return *mesh;
}

const ShardingDecision& decision_for(const PrimRef& prim, Inputs in, const DeviceMesh& mesh) {
  const Layout everywhere = replicated(mesh);
  SmallVector<Operand, 8> seen;
  for (const Tensor& t : in) {
    const ShardSpec* s = placed_spec(t);
    seen.push_back({&t.meta(), s ? &s->layout : &everywhere});
  }
  return mesh.state().decisions.find(prim, seen, mesh);
}

void check_communication(const ShardingDecision& d) {
  if (d.refusal.empty()) return;
  TESSERA_CHECK_AS(ShardingError, may_communicate(), "{}", d.refusal);
  if (context().phase == Phase::kBackward || std::exchange(d.told, true)) return;
  logging::info("communication allowed: {}", d.refusal);
}

Tensors converted_pieces(Inputs in, const DeviceMesh& mesh, const ShardingDecision& d) {
  Tensors pieces;
  for (size_t i = 0; i < in.size(); ++i)
    pieces.push_back(converted_piece(std::move(in[i]), mesh, d.need[i]));
  return pieces;
}

class Redistribute final : public Primitive {
 public:
  static inline const OpInfo kOp{"redistribute",
                                 {.kind = OpKind::kOther,
                                  .precision = Precision::kAsGiven,
                                  .operands = 1,
                                  .takes_storage = true}};
  Redistribute(DeviceMesh mesh, const Layout& to, const Layout& grad)
      : Primitive(kOp), mesh(std::move(mesh)), to(to), grad(grad) {}
  Metas infer(MetaSpan in) const override {
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }
  Tensors vjp(const VjpArgs& v) const override {
    if (grad.empty()) return {v.cot[0]};  // it has the dual layout, as every cotangent
    return {dispatch1(redistribute_primitive(mesh, grad, {}), operands(Tensor(v.cot[0])))};
  }
  void attributes(AttributeVisitor& v) const override {
    v.text("to", tessera::to_string(to)), v.text("grad", tessera::to_string(grad));
  }
  const DeviceMesh mesh;
  const Layout to, grad;
};

}  // namespace

bool may_communicate() {
  return context().communication == Communication::kAlways || context().phase == Phase::kBackward;
}

PrimRef redistribute_primitive(const DeviceMesh& mesh, const Layout& to, const Layout& grad) {
  return PrimRef(new Redistribute(mesh, to, grad));
}

Tensor wrap(const DeviceMesh& mesh, const Layout& layout, const Meta& global, Tensor local) {
  Tensor t(Meta::contiguous(global.shape, global.dtype, global.device), nullptr);
  t.impl()->inference = local.impl()->inference;
  t.impl()->shard = Ref<RefCounted>(new ShardSpec(mesh, layout, std::move(local)));
  t.impl()->layers |= bit(Layer::kSharding);
  return t;
}

Tensor converted_piece(Tensor&& t, const DeviceMesh& mesh, const Layout& to) {
  const ShardSpec* spec = spec_of(t);
  if (spec && spec->layout == to) {
    // Only this operand holds the piece, so it is moved out, and a kernel may write over it.
    if (t.impl()->use_count() == 1 && spec->use_count() == 1)
      return std::move(shard_data(t)->local);
    return spec->local;
  }
  const Layout from = spec ? spec->layout : replicated(mesh);
  const Tensor& local = spec ? spec->local : t;
  if (!local.storage()) {  // it has a shape only, so nothing moves
    Shape piece = shape_of(box_of(t.shape(), to, mesh.sizes(), mesh.coordinate()));
    return Tensor(Meta::contiguous(piece, t.dtype(), t.device()), nullptr);
  }
  return run_route(t.shape(), from, cached_route(t.shape(), from, to, mesh), local, mesh);
}

Tensor convert(const Tensor& t, const DeviceMesh& mesh, const Layout& to) {
  return wrap(mesh, to, t.meta(), converted_piece(Tensor(t), mesh, to));
}

std::string ShardSpec::placement() const { return to_string(layout); }

Tensor ShardSpec::with_local(const Meta& global, Tensor piece) const {
  return wrap(mesh, layout, global, std::move(piece));
}

Tensors ShardSpec::run(const PrimRef& prim, Inputs in) const {
  if (prim->id() == Redistribute::kOp.id) {
    const auto& r = static_cast<const Redistribute&>(*prim);
    Tensor moved = convert(in[0], r.mesh, r.to);
    Tensor& piece = shard_data(moved)->local;
    // The piece may be a slice of the whole tensor: writing into it must not change that tensor.
    bool shares =
        spec_of(in[0]) && piece.storage() && piece.storage() == spec_of(in[0])->local.storage();
    if (shares && context().phase != Phase::kBackward && !(spec_of(in[0])->layout == r.to))
      piece = clone(piece);
    return {moved};
  }
  const DeviceMesh home = common_mesh(*prim, in);
  Tensors out;
  if (Rule rule = find_rule(prim->id()); rule && rule(prim, in, home, out)) return out;

  const ShardingDecision& d = decision_for(prim, in, home);
  check_communication(d);
  Tensors locals = converted_pieces(in, home, d);
  Tensors pieces = dispatch_below(Layer::kSharding, d.local, locals);
  for (size_t k = 0; k < pieces.size(); ++k) {
    TESSERA_ASSERT(pieces[k].shape() == d.pieces[k], "{}: computed {} where {} of {} is {}",
                   prim->name(), describe(pieces[k]), to_string(d.out[k]),
                   to_string(d.results[k].shape), to_string(d.pieces[k]));
    out.push_back(wrap(home, d.out[k], d.results[k], std::move(pieces[k])));
  }
  return out;
}

void ShardSpec::reduce_partials(const PrimRef& prim, Inputs in) const {
  if (prim->id() == Redistribute::kOp.id || find_rule(prim->id())) return;
  bool sums = false;
  for (const Tensor& t : in) {
    const ShardSpec* s = placed_spec(t);
    if (is_sample(t) || (s && !(s->mesh == mesh))) return;  // run() throws the error for it
    sums = sums || (s && std::ranges::any_of(s->layout, &Placement::is_partial));
  }
  if (!sums) return;
  const ShardingDecision& d = decision_for(prim, in, mesh);
  if (d.reduced.empty()) return;
  check_communication(d);
  SmallVector<PrimRef, 2> steps;  // `d` is valid until the next decision
  const SmallVector<int, 2> reduced = d.reduced;
  for (int i : reduced) steps.push_back(redistribute_primitive(mesh, d.need[size_t(i)], {}));
  for (size_t k = 0; k < reduced.size(); ++k) {
    Tensor& operand = in[size_t(reduced[k])];
    operand = dispatch1(steps[k], operands(Tensor(operand)));
  }
}

void ShardSpec::assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) const {
  if (AssignRule rule = find_assign_rule(prim->id())) return rule(dst, prim, in, mesh);
  for (const Tensor& d : dst)
    TESSERA_CHECK_AS(ShardingError, spec_of(d) && spec_of(d)->mesh == mesh,
                     "assign_: a value of {} lies over mesh ({}), its destination {} does not",
                     prim->name(), mesh.to_string(), describe(d));
  Tensors values;
  if (find_sharding(in)) {
    if (assign_in_place(dst, prim, in)) return;
    values = run(prim, in);
  } else {  // plain operands are the same on every rank; each keeps its piece
    for (size_t i = 0; i < in.size(); ++i) check_plain(*prim, i, in[i]);
    for (Tensor& v : dispatch_below(Layer::kSharding, prim, in))
      values.push_back(wrap(mesh, replicated(mesh), v.meta(), v));
  }
  for (size_t i = 0; i < dst.size(); ++i) {
    const ShardSpec& to = *spec_of(dst[i]);
    TESSERA_CHECK_AS(
        ShapeError, dst[i].shape() == values[i].shape() && dst[i].dtype() == values[i].dtype(),
        "assign_: destination is {}, the value is {}", describe(dst[i]), describe(values[i]));
    const Route& route = cached_route(dst[i].shape(), spec_of(values[i])->layout, to.layout, mesh);
    for (const Step& s : route)
      TESSERA_CHECK_AS(ShardingError, !communicates(s, mesh.sizes()) || may_communicate(),
                       "assign_: the value is {}, its destination {}; redistribute() it first",
                       describe(values[i]), describe(dst[i]));
    Tensor piece = converted_piece(std::move(values[i]), mesh, to.layout);
    tessera::assign({&to.local, 1}, copy_primitive(), operands(std::move(piece)));
  }
}

// If the op's results have the layouts of the destinations, each rank's op writes straight into its
// pieces.
bool ShardSpec::assign_in_place(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) const {
  if (prim->id() == Redistribute::kOp.id || find_rule(prim->id())) return false;
  if (!(common_mesh(*prim, in) == mesh)) return false;
  const ShardingDecision& d = decision_for(prim, in, mesh);
  Tensors to;
  for (size_t k = 0; k < d.out.size(); ++k) {
    if (k >= dst.size() || !(spec_of(dst[k])->layout == d.out[k]) ||
        !(dst[k].shape() == d.results[k].shape))
      return false;
    to.push_back(spec_of(dst[k])->local);
  }
  check_communication(d);
  Tensors pieces = converted_pieces(in, mesh, d);
  tessera::assign(to, d.local, pieces);
  return true;
}

Tensor ShardSpec::create(const PrimRef& prim, Inputs in) const {
  SmallVector<const Meta*, 2> metas;
  for (const Tensor& t : in) metas.push_back(&t.meta());
  Meta global = prim->infer(metas)[0];
  Layout whole = layout;
  for (Placement& p : whole)
    if (p.is_partial()) p = Replicate();
  AxisMap map = prim->axes(metas);
  SmallVector<Range, 8> loops;
  for (const Range& r : box_of(global.shape, whole, mesh.sizes(), mesh.coordinate()))
    loops.push_back(r);
  for (size_t f = loops.size(); f < map.factors.size(); ++f)
    loops.push_back({0, map.factors[f].extent, map.factors[f].extent});
  PrimRef mine = prim->localize(map, loops);
  if (!mine) mine = prim;
  return at_bottom(prim->name(), in, [&](Inputs in) {
    return wrap(mesh, whole, global, dispatch_below(Layer::kSharding, mine, in)[0]);
  });
}

Layout dual(const Layout& forward, Layout g, const Shape& global, const DeviceMesh& mesh) {
  for (size_t a = 0; a < forward.size(); ++a) {
    if (forward[a].is_shard()) g[a] = forward[a];
    if (forward[a].is_partial()) g[a] = Replicate();
  }
  // On an axis where the cotangent may have any layout, it may cut a dim so that the required cuts
  // do not fit inside its pieces any more.
  for (size_t a = 0; a < forward.size() && !fits(global, g, mesh.sizes()); ++a)
    if (forward[a].is_replicate() && g[a].is_shard()) g[a] = Replicate();
  return g;
}

Tensor ShardSpec::pin_cotangent(const Tensor& forward, Tensor g) const {
  const ShardSpec* operand = placed_spec(forward);
  const ShardSpec* cotangent = placed_spec(g);
  if (!operand) return full_tensor(g);
  const Layout now = cotangent ? cotangent->layout : replicated(mesh);
  Layout want = dual(operand->layout, now, forward.shape(), operand->mesh);
  if (cotangent && want == now) return g;
  if (!cotangent) g = from_local(g, operand->mesh, now);
  return dispatch1(redistribute_primitive(operand->mesh, want, {}), operands(std::move(g)));
}

Tensor ShardSpec::whole_value() const {
  for (size_t a = 0; a < layout.size(); ++a)
    TESSERA_CHECK_AS(ShardingError, layout[a].is_replicate() || mesh.sizes()[a] == 1,
                     "reading values: a tensor that is {} over mesh ({}), of which no rank has all "
                     "values; take full_tensor() of it on every rank, or redistribute() it to "
                     "Replicate",
                     to_string(layout), mesh.to_string());
  return local;
}

}  // namespace tessera
