// scatter_rows(x, group, root): x [size * n, ..] of `root` -> its rows r * n .. on rank r, [n, ..].
// On the other ranks x says shape and dtype alone. It has no derivative.
#include "collectives/ops.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/kernel.h"

using namespace tessera;

namespace {

class ScatterRows final : public CollectivePrimitive {
 public:
  static inline const OpInfo kOp{"scatter_rows", {OpKind::kCollective, Precision::kAsGiven, 1}};
  ScatterRows(Ref<ProcessGroup> group, int root)
      : CollectivePrimitive(kOp, std::move(group)), root(root) {}
  Metas infer(MetaSpan in) const override {
    Shape shape = in[0]->shape;
    TESSERA_CHECK_AS(ShapeError, !shape.empty() && shape[0] % group->size() == 0,
                     "scatter_rows: {} cannot be cut into rows of {} ranks", describe(in),
                     group->size());
    shape[0] /= group->size();
    return {Meta::contiguous(shape, in[0]->dtype, in[0]->device)};
  }
  const Kernel* own_kernel(DeviceKind) const override;
  void attributes(AttributeVisitor& v) const override {
    v.text("group", group->name());
    v.integer("root", root);
  }

  const int root;
};

void plan(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.dense_in = 1;
}
void run(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
         const Stream&) {
  const auto& p = static_cast<const ScatterRows&>(prim);
  if (p.group->rank() != p.root) in = {};
  p.submit({.kind = CollKind::kScatter, .peer = p.root, .in = in, .out = out});
}
const Kernel* ScatterRows::own_kernel(DeviceKind) const {
  static const Kernel kernel{plan, run};
  return &kernel;
}

}  // namespace

Tensor scatter_rows(const Tensor& x, const Ref<ProcessGroup>& group, int root) {
  return dispatch1(PrimRef(new ScatterRows(group, root)), operands(Tensor(x)));
}
