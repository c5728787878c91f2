#include "dtensor/dtensor.h"

#include "collectives/ops.h"
#include "core/autograd/autograd.h"
#include "core/autograd/level.h"
#include "core/dispatch/context.h"
#include "core/ops/create.h"
#include "core/ops/views.h"
#include "core/tensor/wrapped.h"
#include "dtensor/redistribute.h"
#include "dtensor/shard_spec.h"

namespace tessera {
namespace {

// The layout that the ranks' gradients of pieces in `layout` must have: the dual, but Replicate for
// Replicate, since plain gradients say nothing of another layout.
Layout closed_dual(Layout layout) {
  for (Placement& p : layout)
    if (p.is_partial()) p = Replicate();
  return layout;
}

// Whether two reductions, over different axes, may be done in either order.
bool commute(ReduceOp a, ReduceOp b) {
  auto is_sum = [](ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kAvg; };
  return a == b || (is_sum(a) && is_sum(b));
}

void check_layout(const char* op, const DeviceMesh& mesh, const Layout& layout) {
  TESSERA_CHECK(mesh.defined(), "{}: the mesh is undefined; make one with init_device_mesh", op);
  TESSERA_CHECK_AS(ShardingError, int(layout.size()) == mesh.ndim(),
                   "{}: layout {} on mesh ({}); give a placement for each axis", op,
                   to_string(layout), mesh.to_string());
  const Placement* first = nullptr;
  for (const Placement& p : layout) {
    if (!p.is_partial()) continue;
    if (!first) first = &p;
    TESSERA_CHECK_AS(ShardingError, commute(first->op, p.op),
                     "{}: {} has no value of its own, it depends on which axis is reduced first; "
                     "reduce one of them before the other is partial",
                     op, to_string(layout));
  }
}

// Where each rank infers the global shape from its own piece, all pieces must have the same shape.
void check_even(const Tensor& local, const DeviceMesh& mesh, const Layout& layout) {
  if (std::ranges::none_of(layout, [](const Placement& p) { return p.is_shard(); })) return;
  if (context().records) return;
  std::vector<int64_t> extents;
  for (int64_t e : local.shape()) extents.push_back(e), extents.push_back(-e);
  Tensor largest = from_values<int64_t>(extents, {int64_t(extents.size())});
  for (int a = 0; a < mesh.ndim(); ++a)
    largest = all_reduce(largest, mesh.group(a), ReduceOp::kMax);
  const int64_t* most = largest.data<int64_t>();
  for (int d = 0; d < local.ndim(); ++d)
    TESSERA_CHECK_AS(
        ShardingError, most[2 * d] == -most[2 * d + 1],
        "from_local: dim {} of the ranks' pieces is {} to {}, here {}; give the global "
        "shape where shards are uneven",
        d, -most[2 * d + 1], most[2 * d], describe(local));
}

const ShardSpec* spec_inside(const char* op, const Tensor& t) {
  TESSERA_CHECK(!is_sample(t) || !innermost(t).is_sharded(),
                "{}: {} is a sample of vmap, whose batch is placed, not the samples; call it "
                "outside, on arguments and results",
                op, describe(t));
  return placed_spec(t);
}

const ShardSpec& need_spec(const char* op, const Tensor& t) {
  const ShardSpec* s = spec_inside(op, t);
  TESSERA_CHECK(s, "{}: {} is a plain tensor; distribute() it first", op, describe(t));
  return *s;
}

// The op that converts between plain and sharded tensors; other ops do not mix them.
class Border : public CustomFunction {
 public:
  Border(DeviceMesh mesh, Layout layout) : mesh_(std::move(mesh)), layout_(std::move(layout)) {}

 protected:
  const DeviceMesh mesh_;
  const Layout layout_;
};

class Distribute final : public Border {
 public:
  using Border::Border;
  std::string_view name() const override { return "distribute"; }
  Tensors forward(std::span<const Tensor> in) override {
    return {at_bottom(name(), operands(Tensor(in[0])), [&](Inputs full) {
      Tensor piece = converted_piece(Tensor(full[0]), mesh_, layout_);
      if (piece.storage() == full[0].storage()) piece = clone(piece);  // releases the whole tensor
      return wrap(mesh_, layout_, full[0].meta(), piece);
    })};
  }
  Tensors vjp(std::span<const Tensor>, std::span<const Tensor> cot) override {
    return {full_tensor(cot[0])};
  }
};

class FromLocal final : public Border {
 public:
  FromLocal(DeviceMesh mesh, const Layout& layout, const Shape& global)
      : Border(std::move(mesh), layout), global_(global) {}
  std::string_view name() const override { return "from_local"; }
  Tensors forward(std::span<const Tensor> in) override {
    return {at_bottom(name(), operands(Tensor(in[0])), [&](Inputs piece) {
      return wrap(mesh_, layout_, Meta::contiguous(global_, piece[0].dtype(), piece[0].device()),
                  piece[0].detach());
    })};
  }
  Tensors vjp(std::span<const Tensor>, std::span<const Tensor> cot) override {
    return {to_local(redistribute(cot[0], closed_dual(layout_)))};
  }

 private:
  const Shape global_;
};

class ToLocal final : public Border {
 public:
  ToLocal(DeviceMesh mesh, const Layout& grad, const Meta& global)
      : Border(std::move(mesh), grad), global_(global.shape) {}
  std::string_view name() const override { return "to_local"; }
  Tensors forward(std::span<const Tensor> in) override {
    return {
        at_bottom(name(), operands(Tensor(in[0])), [](Inputs t) { return spec_of(t[0])->local; })};
  }
  Tensors vjp(std::span<const Tensor>, std::span<const Tensor> cot) override {
    return {from_local(cot[0], mesh_, layout_, global_)};
  }

 private:
  const Shape global_;
};

Tensor cross(Ref<CustomFunction> border, const Tensor& t) {
  return std::move(apply_function(std::move(border), {&t, 1})[0]);
}

}  // namespace

AllowCommunication::AllowCommunication() : on_(context().communication, Communication::kAlways) {}
LossParallel::LossParallel()
    : on_(context().communication, Communication::kInLosses),
      same_targets_(context().replicate_plain, true) {}
ReplicatePlain::ReplicatePlain() : on_(context().replicate_plain, true) {}

Tensor at_bottom(std::string_view op, Inputs in, FunctionRef<Tensor(Inputs)> f) {
  Level* level = current_level();
  if (!level) return f(in);
  Tensors outside;
  for (const Tensor& t : in) {
    bool batched = false;
    outside.push_back(level->inner(t, batched));
    TESSERA_CHECK(!batched,
                  "{}: {} is a sample of vmap, which cannot be placed; call it outside. Where "
                  "backward called it, a gradient of a sharded tensor depends on the sample: take "
                  "that gradient outside",
                  op, describe(t));
  }
  Tensor out;
  {
    Level::Outside scope(*level);
    NoGrad off;
    out = at_bottom(op, outside, f);
  }
  return level->wrap(std::move(out), false);
}

const DeviceMesh& mesh_of(const Tensor& t) { return need_spec("mesh_of", t).mesh; }
const Layout& layout_of(const Tensor& t) { return need_spec("layout_of", t).layout; }

Box box_of(const Tensor& t) {
  if (const ShardSpec* s = spec_inside("box_of", t))
    return box_of(t.shape(), s->layout, s->mesh.sizes(), s->mesh.coordinate());
  Box box;
  for (int64_t e : t.shape()) box.push_back({0, e, e});
  return box;
}

Tensor distribute(const Tensor& full, const DeviceMesh& mesh, const Layout& layout) {
  check_layout("distribute", mesh, layout);
  TESSERA_CHECK(!spec_inside("distribute", full),
                "distribute: {} is sharded already; use redistribute()", describe(full));
  box_of(full.shape(), layout, mesh.sizes(), mesh.coordinate());
  return cross(make_ref<Distribute>(mesh, layout), full);
}

Tensor redistribute(const Tensor& t, const Layout& to, const Layout& grad) {
  const ShardSpec& s = need_spec("redistribute", t);
  check_layout("redistribute", s.mesh, to);
  if (!grad.empty()) check_layout("redistribute", s.mesh, grad);
  if (s.layout == to && grad.empty()) return t;
  return dispatch1(redistribute_primitive(s.mesh, to, grad), operands(Tensor(t)));
}

Tensor redistribute(const Tensor& t, std::string_view axis, const Placement& to) {
  const ShardSpec& s = need_spec("redistribute", t);
  Layout layout = s.layout;
  layout[size_t(s.mesh.axis(axis))] = to;
  return redistribute(t, layout);
}

Tensor from_local(const Tensor& local, const DeviceMesh& mesh, const Layout& layout,
                  const Shape& global) {
  check_layout("from_local", mesh, layout);
  TESSERA_CHECK(!spec_inside("from_local", local), "from_local: {} is sharded already",
                describe(local));
  Shape whole = global;
  if (global.empty() && local.ndim() > 0) {
    whole = local.shape();
    check_even(local, mesh, layout);
    for (size_t a = 0; a < layout.size(); ++a)
      if (layout[a].is_shard()) {
        TESSERA_CHECK_AS(ShardingError, layout[a].dim >= 0 && layout[a].dim < whole.size(),
                         "from_local: {} of {}", to_string(layout[a]), describe(local));
        whole[layout[a].dim] *= mesh.sizes()[a];
      }
  }
  Shape piece = shape_of(box_of(whole, layout, mesh.sizes(), mesh.coordinate()));
  TESSERA_CHECK_AS(
      ShardingError, piece == local.shape(),
      "from_local: this rank's piece of {} in {} over mesh ({}) is {}, not {}; give the "
      "global shape where shards are uneven",
      to_string(whole), to_string(layout), mesh.to_string(), to_string(piece),
      to_string(local.shape()));
  return cross(make_ref<FromLocal>(mesh, layout, whole), local);
}

Tensor to_local(const Tensor& t, const Layout& grad) {
  const ShardSpec& s = need_spec("to_local", t);
  if (!grad.empty()) check_layout("to_local", s.mesh, grad);
  return cross(make_ref<ToLocal>(s.mesh, grad.empty() ? closed_dual(s.layout) : grad, t.meta()), t);
}

Tensor full_tensor(const Tensor& t) {
  const ShardSpec* s = spec_inside("full_tensor", t);
  return s ? to_local(redistribute(t, replicated(s->mesh))) : t;
}

}  // namespace tessera
