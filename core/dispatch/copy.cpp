#include "core/dispatch/copy.h"

#include "core/dispatch/context.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/kernel.h"

namespace tessera {
namespace {

class Copy final : public Primitive {
 public:
  static inline const OpInfo kOp{
      "copy",
      {.kind = OpKind::kOther, .precision = Precision::kAsGiven, .operands = 1, .plain = true}};
  Copy() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override {
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = pointwise_axes(in, in[0]->shape);
    m.jointly_linear = true;
    return m;
  }
  Tensors vjp(const VjpArgs& v) const override { return {v.cot[0]}; }
};

}  // namespace

const PrimRef& copy_primitive() {
  static const PrimRef copy(new Copy);
  return copy;
}

void copy_values(const Tensor& dst, const Tensor& src) {
  const Kernel& kernel = kernel_table().find(src.device().kind, copy_primitive()->id());
  TESSERA_ASSERT(kernel, "copy: no kernel for {}", to_string(src.device()));
  src.storage()->wait_ready();
  dst.storage()->wait_writable();
  kernel.run(*copy_primitive(), {&src, 1}, {&dst, 1}, {}, context().stream);
}

Tensor dense_copy(const Tensor& t) {
  Tensor out = empty(Meta::contiguous(t.shape(), t.dtype(), t.device()));
  copy_values(out, t);
  return out;
}

}  // namespace tessera
