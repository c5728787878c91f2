// cast and where: pointwise ops whose operands differ in dtype.
#include "core/dispatch/context.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/pointwise.h"
#include "core/ops/samples.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

struct CastAttributes {
  DType to = kF32;
  static void fields(auto& a, auto& f) { f("to", a.to); }
};
class Cast final : public PrimitiveOf<Cast, CastAttributes> {
 public:
  static inline const OpInfo kOp{"cast",
                                 {.kind = OpKind::kPointwise,
                                  .precision = Precision::kAsGiven,
                                  .operands = 1,
                                  .cost = 1,
                                  .plain = true,
                                  .takes_storage = true}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    return {{in[0]->shape, contiguous_strides(in[0]->shape), to, in[0]->device}};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = pointwise_axes(in, in[0]->shape);
    m.jointly_linear = is_differentiable(in[0]->dtype) && is_differentiable(to);
    return m;
  }
  // The operand's dtype is read from its shape-only copy.
  Tensors vjp(const VjpArgs& v) const override {
    if (!is_differentiable(v.in[0].dtype()) || !is_differentiable(to)) return {Tensor()};
    DType from = v.in[0].dtype();
    if (from == to) return {v.cot[0]};
    return {dispatch_into(v.grad_buffer_of(0), cast_primitive(from), operands(Tensor(v.cot[0])))};
  }
  bool differentiable() const override { return is_differentiable(to); }
};

class Where final : public Primitive {
 public:
  static inline const OpInfo kOp{"where",
                                 {.kind = OpKind::kPointwise,
                                  .precision = Precision::kAsGiven,
                                  .operands = 3,
                                  .cost = 1,
                                  .plain = true,
                                  .promotion = Promotion::kAfterFirst}};
  Where() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override {
    TESSERA_CHECK(in[0]->dtype == kBool && in[1]->dtype == in[2]->dtype,
                  "where: takes a bool condition and two values of one dtype, got {}",
                  describe(in));
    Shape shape = broadcast(broadcast(in[0]->shape, in[1]->shape, "where"), in[2]->shape, "where");
    return {Meta::contiguous(shape, in[1]->dtype, device_of(in))};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = pointwise_axes(in, infer(in)[0].shape);
    return m;
  }
  SaveMask saved() const override { return {1, 0}; }
  Tensors vjp(const VjpArgs& v) const override {
    const Tensor& g = v.cot[0];
    Tensor zero = number_beside(g, 0.0, g.dtype());
    return {Tensor(), v.wants(1) ? sum_to(where(v.in[0], g, zero), v.in[1].shape()) : Tensor(),
            v.wants(2) ? sum_to(where(v.in[0], zero, g), v.in[2].shape()) : Tensor()};
  }
};

}  // namespace

const PrimRef& cast_primitive(DType to) {
  static const auto* prims = [] {
    auto* p = new SmallVector<PrimRef, kNumDTypes>;
    for (DType t : kAllDTypes) p->push_back(PrimRef(new Cast({t})));
    return p;
  }();
  return (*prims)[size_t(to)];
}

Tensor cast(Tensor x, DType dtype) {
  if (x.dtype() == dtype) return x;
  return dispatch1(cast_primitive(dtype), operands(std::move(x)));
}

Tensor where(Tensor condition, Tensor a, Tensor b) {
  static const PrimRef prim(new Where);
  return dispatch1(prim, operands(cast(std::move(condition), kBool), std::move(a), std::move(b)));
}

Tensor where(Tensor condition, Tensor a, Scalar b) {
  Tensor number = number_beside(a, b, result_type(a, b));
  return where(std::move(condition), std::move(a), std::move(number));
}
Tensor where(Tensor condition, Scalar a, Tensor b) {
  Tensor number = number_beside(b, a, result_type(b, a));
  return where(std::move(condition), std::move(number), std::move(b));
}
Tensor where(Tensor condition, Scalar a, Scalar b) {
  DType t = promote(a.kind(), b.kind());
  if (t == kF64) t = context().default_dtype;
  Tensor yes = number_beside(condition, a, t), no = number_beside(condition, b, t);
  return where(std::move(condition), std::move(yes), std::move(no));
}

void register_select_ops(OpRegistry& registry) {
  registry.add("cast", [] {
    std::vector<Sample> s;
    // Sweeps compute with results, so that storage formats have tests of their own.
    for (DType t : kComputedDTypes)
      s.push_back({cast_primitive(t), {sample_values({3, 4}, 0.3, 2, 1)}, t == kF64});
    s.push_back({cast_primitive(kF64), {cast(sample_values({3, 4}, -2, 2, 1), kF32)}, false});
    return s;
  });
  registry.add("where", [] {
    PrimRef prim(new Where);
    Tensor c = gt(sample_values({3, 4}, -1, 1, 1), 0);
    return std::vector<Sample>{
        {prim, {c, sample_values({3, 4}, -2, 2, 2), sample_values({4}, -2, 2, 3)}, true},
        {prim, {c, sample_values({}, -2, 2, 2), sample_values({3, 1}, -2, 2, 3)}, true}};
  });
}

}  // namespace tessera
