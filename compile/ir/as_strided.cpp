#include "compile/ir/as_strided.h"

namespace tessera::compiler {
namespace {

class AsStrided final : public Primitive {
 public:
  static inline const OpInfo kOp{"as_strided", {OpKind::kView, Precision::kAsGiven, 1}};
  AsStrided(const Shape& shape, const Strides& strides, int64_t offset)
      : Primitive(kOp), shape_(shape), strides_(strides), offset_(offset) {}
  Metas infer(MetaSpan in) const override {
    return {{shape_, strides_, in[0]->dtype, in[0]->device}};
  }
  Tensors view(std::span<const Tensor> in) const override {
    Tensor t({shape_, strides_, in[0].dtype(), in[0].device()}, in[0].storage(),
             in[0].offset() + offset_);
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
  void attributes(AttributeVisitor& v) const override {
    v.dims("shape", shape_), v.dims("strides", strides_), v.integer("offset", offset_);
  }
  PrimRef with_attributes(AttributeReader& a) const override {
    return PrimRef(new AsStrided(a.numbers("shape"), a.numbers("strides"), a.integer("offset")));
  }

 private:
  const Shape shape_;
  const Strides strides_;
  const int64_t offset_;
};

}  // namespace

PrimRef as_strided(const Shape& shape, const Strides& strides, int64_t offset) {
  return PrimRef(new AsStrided(shape, strides, offset));
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
