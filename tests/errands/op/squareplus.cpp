// squareplus(x) = (x + sqrt(x^2 + 4)) / 2 (Barron 2021), floats of any shape. Its loops say how it
// is sharded and batched; what it is made of is what runs, and what a compiled step fuses.
#include "core/dispatch/dispatch.h"
#include "core/ops/pointwise.h"

using namespace tessera;

class Squareplus final : public Primitive {
 public:
  static inline const OpInfo kOp{"squareplus", {OpKind::kPointwise, Precision::kAsGiven, 1, 4}};
  Squareplus() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override {
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override { return pointwise_axes(in, in[0]->shape); }
  SaveMask saved() const override { return {.inputs = 1}; }
  Tensors vjp(const VjpArgs& v) const override {
    return {v.cot[0] * (v.in[0] / sqrt(square(v.in[0]) + 4.0) + 1.0) * 0.5};
  }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    return {(in[0] + sqrt(square(in[0]) + 4.0)) * 0.5};
  }
};

Tensor squareplus(const Tensor& x) {
  static const PrimRef prim(new Squareplus);
  return dispatch1(prim, operands(Tensor(x)));
}
