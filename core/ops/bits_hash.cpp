#include "core/ops/bits_hash.h"

#include "core/dispatch/dispatch.h"
#include "core/ops/register.h"
#include "core/ops/samples.h"

namespace tessera {
namespace {

class BitsHash final : public Primitive {
 public:
  static inline const OpInfo kOp{"bits_hash", {OpKind::kOther, Precision::kAsGiven, 1}};
  BitsHash() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override { return {Meta::contiguous({2}, kI64, in[0]->device)}; }
  bool differentiable() const override { return false; }
};

}  // namespace

Tensor bits_hash(const Tensor& x) {
  static const PrimRef prim(new BitsHash);
  return dispatch1(prim, operands(x));
}

void register_bits_hash_ops(OpRegistry& registry) {
  registry.add("bits_hash", [] {
    return std::vector<Sample>{
        {PrimRef(new BitsHash), {sample_integers({3, 5}, -9, 9, 1)}, false},
        {PrimRef(new BitsHash), {sample_integers({2, 3, 2}, 0, 1 << 30, 2)}, false}};
  });
}

}  // namespace tessera
