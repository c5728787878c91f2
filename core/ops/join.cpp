// Ops that move values between tensors of different extents: cat, split and the vjp of slice, with
// the copies behind contiguous and clone.
#include "core/dispatch/copy.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/dim_attributes.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"
#include "core/tensor/extents.h"

namespace tessera {
namespace {

// The loops of along_dim_axes, for ops that only move values.
AxisMap moving_axes(MetaSpan in, std::span<const Meta> out, int dim) {
  AxisMap m = along_dim_axes(in, out, dim);
  m.jointly_linear = true;
  return m;
}

class Cat final : public PrimitiveOf<Cat, CatAttributes> {
 public:
  int64_t operand_count() const override { return kAnyNumber; }
  static inline const OpInfo kOp{"cat",
                                 {.kind = OpKind::kOther,
                                  .precision = Precision::kAsGiven,
                                  .operands = 1,
                                  .promotion = Promotion::kAll,
                                  .takes_storage = true}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    Shape s = in[0]->shape;
    for (size_t i = 1; i < in.size(); ++i) {
      const Shape& t = in[i]->shape;
      bool fits = t.size() == s.size() && in[i]->dtype == in[0]->dtype;
      for (int d = 0; d < s.size() && fits; ++d) fits = d == dim || s[d] == t[d];
      TESSERA_CHECK_AS(ShapeError, fits, "cat: parts {} differ outside dim {}", describe(in), dim);
      s[dim] = extent_sum(s[dim], t[dim], "cat");
    }
    return {Meta::contiguous(s, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override { return moving_axes(in, infer(in), dim); }
  Tensors vjp(const VjpArgs& v) const override {
    Tensors g;
    int64_t at = 0;
    for (size_t i = 0; i < v.in.size(); ++i) {
      int64_t size = v.in[i].shape()[dim];
      g.push_back(v.wants(int(i)) ? narrow(v.cot[0], dim, at, size) : Tensor());
      at += size;
    }
    return g;
  }
};

struct SplitAttributes {
  int dim = 0;
  std::vector<int64_t> sizes;
  static void fields(auto& a, auto& f) { f.dim("dim", a.dim), f("sizes", a.sizes); }
};
class Split final : public PrimitiveOf<Split, SplitAttributes> {
 public:
  static inline const OpInfo kOp{"split", {OpKind::kView, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    Metas out;
    int64_t total = 0;
    for (int64_t size : sizes) {
      TESSERA_CHECK_AS(ShapeError, size >= 0, "split: size {} in {}; sizes are not negative", size,
                       to_string(sizes));
      Shape s = in[0]->shape;
      s[dim] = size;
      total = extent_sum(total, size, "split");
      out.push_back(Meta::contiguous(s, in[0]->dtype, in[0]->device));
    }
    TESSERA_CHECK_AS(ShapeError, total == in[0]->shape[dim],
                     "split: sizes {} of dim {} of {} do not add up", to_string(sizes), dim,
                     describe(in));
    return out;
  }
  AxisMap axes(MetaSpan in) const override { return moving_axes(in, infer(in), dim); }
  Tensors view(std::span<const Tensor> operands) const override {
    const Tensor& in = operands[0];
    Tensors out;
    int64_t at = 0;
    for (int64_t size : sizes) {
      Shape s = in.shape();
      s[dim] = size;
      out.push_back(Tensor({s, in.strides(), in.dtype(), in.device()}, in.storage(),
                           in.offset() + at * in.strides()[dim]));
      out.back().impl()->become_view_of(*in.impl());
      out.back().impl()->repeated |= in.strides()[dim] == 0 && in.shape()[dim] > 1;
      at += size;
    }
    return out;
  }
  Tensors vjp(const VjpArgs& v) const override {
    Tensors parts;
    for (size_t i = 0; i < v.cot.size(); ++i) {
      Shape s = v.in[0].shape();
      s[dim] = sizes[i];
      parts.push_back(v.cot[i].defined()
                          ? v.cot[i]
                          : expand(scalar_tensor(0.0, v.in[0].dtype(), v.in[0].device()), s));
    }
    return {cat(parts, dim)};
  }
};

// Every element of `dim`, which disappears. Its derivative is one stack, where selects would pad
// each part and add them up.
class Unbind final : public PrimitiveOf<Unbind, DimAttributes> {
 public:
  static inline const OpInfo kOp{"unbind", {OpKind::kView, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    Shape s = in[0]->shape;
    TESSERA_CHECK_AS(ShapeError, dim < s.size(), "unbind: dim {} of {}", dim, describe(in));
    s.erase(dim);
    Metas out;
    for (int64_t i = 0; i < in[0]->shape[dim]; ++i)
      out.push_back(Meta::contiguous(s, in[0]->dtype, in[0]->device));
    return out;
  }
  AxisMap axes(MetaSpan in) const override {
    const Shape& s = in[0]->shape;
    AxisMap m;
    m.jointly_linear = true;
    for (int d = 0; d < s.size(); ++d) m.add(d == dim ? Factor::kWhole : Factor::kPass, s[d]);
    m.in.push_back(broadcast_loops(s, s));
    OperandLoops part = m.in[0];
    part.erase(size_t(dim));
    for (int64_t i = 0; i < s[dim]; ++i) m.out.push_back(part);
    return m;
  }
  Tensors view(std::span<const Tensor> in) const override {
    Tensors out;
    for (int64_t i = 0; i < in[0].shape()[dim]; ++i) {
      Shape s = in[0].shape();
      Strides st = in[0].strides();
      int64_t offset = in[0].offset() + i * st[dim];
      s.erase(dim), st.erase(dim);
      out.push_back(Tensor({s, st, in[0].dtype(), in[0].device()}, in[0].storage(), offset));
      out.back().impl()->become_view_of(*in[0].impl());
      out.back().impl()->repeated |= in[0].strides()[dim] == 0 && in[0].shape()[dim] > 1;
    }
    return out;
  }
  Tensors vjp(const VjpArgs& v) const override {
    Tensors parts;
    for (size_t i = 0; i < v.out.size(); ++i) {
      const Tensor& g = v.cot[i];
      parts.push_back(g.defined() ? g
                                  : expand(scalar_tensor(0.0, v.in[0].dtype(), v.in[0].device()),
                                           v.out[i].shape()));
    }
    return {stack(parts, dim)};
  }
};

class Unslice final : public PrimitiveOf<Unslice, UnsliceAttributes> {
 public:
  static inline const OpInfo kOp{"unslice", {OpKind::kOther, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    Shape s = in[0]->shape;
    TESSERA_CHECK_AS(ShapeError, dim < s.size() && steps_fit(begin, s[dim], step, extent),
                     "unslice: {} from {} in steps of {} does not fit extent {}", describe(in),
                     begin, step, extent);
    s[dim] = extent;
    return {Meta::contiguous(s, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override { return moving_axes(in, infer(in), dim); }
  Tensors vjp(const VjpArgs& v) const override {
    int64_t size = v.in[0].shape()[dim];
    return {slice(v.cot[0], dim, begin, size ? begin + (size - 1) * step + 1 : begin, step)};
  }
};

}  // namespace

Tensor contiguous(Tensor x, MemoryFormat format) {
  TESSERA_CHECK_AS(ShapeError, format == MemoryFormat::kContiguous || x.ndim() >= 3,
                   "contiguous: channels-last takes [N, C, ..], got {}", describe(x));
  if (x.is_contiguous(format)) return x;
  if (format == MemoryFormat::kContiguous) return clone(x);
  // A dense copy of the dims in the order of memory, seen in their own order.
  return movedim(clone(movedim(x, {1}, {-1})), {-1}, {1});
}
Tensor clone(const Tensor& x) { return dispatch1(copy_primitive(), operands(Tensor(x))); }

Tensor cat(std::span<const Tensor> parts, int64_t dim) {
  TESSERA_CHECK(!parts.empty(), "cat: no parts");
  int d = wrap_dim(dim, parts[0].ndim(), "cat");
  Tensors in;
  for (const Tensor& p : parts) {
    TESSERA_CHECK_AS(ShapeError, p.ndim() > 0, "cat: a 0-d tensor cannot be joined; use stack");
    in.push_back(p);
  }
  if (in.size() == 1) return clone(in[0]);
  return dispatch1(PrimRef(new Cat({d})), in);
}

Tensor stack(std::span<const Tensor> parts, int64_t dim) {
  TESSERA_CHECK(!parts.empty(), "stack: no parts");
  Tensors in;
  for (const Tensor& p : parts) in.push_back(unsqueeze(p, dim));
  return cat(in, wrap_dim(dim, parts[0].ndim() + 1, "stack"));
}

Tensors split(const Tensor& x, const std::vector<int64_t>& sizes, int64_t dim) {
  Tensor in = x;
  int d = wrap_dim(dim, x.ndim(), "split");
  TESSERA_CHECK_AS(ShapeError, x.ndim() > 0, "split: a 0-d tensor has no dim to cut");
  PrimRef prim(new Split({d, sizes}));
  const Meta* meta[] = {&x.meta()};
  prim->infer(meta);
  return dispatch(prim, {&in, 1});
}

Tensors split(const Tensor& x, int64_t size, int64_t dim) {
  const int d = wrap_dim(dim, x.ndim(), "split");
  TESSERA_CHECK_AS(ShapeError, x.ndim() > 0 && size >= 1, "split: pieces of {} of {}", size,
                   to_string(x.shape()));
  std::vector<int64_t> sizes;
  const int64_t e = x.shape()[d];
  for (int64_t at = 0; at < e; at += size) sizes.push_back(std::min(size, e - at));
  if (sizes.empty()) sizes.push_back(0);
  return split(x, sizes, d);
}

Tensors chunk(const Tensor& x, int64_t pieces, int64_t dim) {
  int d = wrap_dim(dim, x.ndim(), "chunk");
  TESSERA_CHECK_AS(ShapeError, x.ndim() > 0 && pieces >= 1, "chunk: {} pieces of {}", pieces,
                   to_string(x.shape()));
  const int64_t e = x.shape()[d];
  if (e == 0) return split(x, std::vector<int64_t>(size_t(pieces), 0), d);
  const int64_t size = (e - 1) / pieces + 1;
  Tensors out;
  for (int64_t at = 0; at < e; at += size) out.push_back(narrow(x, d, at, std::min(size, e - at)));
  return out;
}

Tensors unbind(const Tensor& x, int64_t dim) {
  Tensor in = x;
  PrimRef prim(new Unbind({wrap_dim(dim, x.ndim(), "unbind")}));
  const Meta* meta[] = {&x.meta()};
  prim->infer(meta);
  return dispatch(prim, {&in, 1});
}

Tensor unslice(const Tensor& x, int64_t dim, int64_t begin, int64_t step, int64_t extent) {
  return dispatch1(PrimRef(new Unslice({int(dim), begin, step, extent})), operands(Tensor(x)));
}

void register_join_ops(OpRegistry& registry) {
  registry.add("copy", [] {
    return std::vector<Sample>{
        {copy_primitive(), {permute(sample_values({2, 3}, -1, 1, 1), {1, 0})}}};
  });
  registry.add("transfer", [] {
    return std::vector<Sample>{
        {transfer_primitive(kCPU), {permute(sample_values({2, 3}, -1, 1, 1), {1, 0})}}};
  });
  registry.add("cat", [] {
    return std::vector<Sample>{{PrimRef(new Cat({1})),
                                {sample_values({2, 3}, -1, 1, 1), sample_values({2, 1}, -1, 1, 2),
                                 sample_values({2, 2}, -1, 1, 3)}}};
  });
  registry.add("split", [] {
    return std::vector<Sample>{
        {PrimRef(new Split({1, {1, 2, 2}})), {sample_values({2, 5}, -1, 1, 1)}}};
  });
  registry.add("unbind", [] {
    return std::vector<Sample>{{PrimRef(new Unbind({1})), {sample_values({2, 3, 4}, -1, 1, 1)}}};
  });
  registry.add("unslice", [] {
    return std::vector<Sample>{
        {PrimRef(new Unslice({1, 1, 2, 6})), {sample_values({2, 3}, -1, 1, 1)}}};
  });
}

}  // namespace tessera
