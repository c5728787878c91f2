#include "compile/ir/as_strided.h"

#include "core/primitive/primitive_of.h"

namespace tessera::compiler {
namespace {

struct AsStridedAttributes {
  Shape shape;
  Strides strides;
  int64_t offset = 0;
  static void fields(auto& a, auto& f) {
    f("shape", a.shape), f("strides", a.strides), f.any("offset", a.offset);
  }
};

class AsStrided final : public PrimitiveOf<AsStrided, AsStridedAttributes> {
 public:
  static inline const OpInfo kOp{"as_strided", {OpKind::kView, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    return {{shape, strides, in[0]->dtype, in[0]->device}};
  }
  Tensors view(std::span<const Tensor> in) const override {
    Tensor t({shape, strides, in[0].dtype(), in[0].device()}, in[0].storage(),
             in[0].offset() + offset);
    if (t.storage()) {
      Range r = extent_of(t.meta(), t.offset());
      size_t bytes = size_t(r.begin + r.size) * size_of(t.dtype());
      TESSERA_CHECK(r.size == 0 || (r.begin >= 0 && bytes <= t.storage()->bytes()),
                    "as_strided: elements {} to {} of a storage of {} bytes; pass the tensor that "
                    "was viewed as an input",
                    r.begin, r.begin + r.size, t.storage()->bytes());
    }
    return {t};
  }
};

}  // namespace

PrimRef as_strided(const Shape& shape, const Strides& strides, int64_t offset) {
  return PrimRef(new AsStrided({shape, strides, offset}));
}

Range extent_of(const Meta& m, int64_t offset) {
  int64_t last = offset;
  for (int d = 0; d < m.shape.size(); ++d) {
    if (m.shape[d] == 0) return {offset, 0, 0};
    last += (m.shape[d] - 1) * m.strides[d];  // strides are never negative
  }
  return {offset, last + 1 - offset, 0};
}

}  // namespace tessera::compiler
