// Products with sparse matrices. spmm, the sampled product sddmm and the transposition of the
// structure are closed under derivatives: each gradient is one of the others, so they can be
// differentiated again.
#include "core/ops/sparse.h"

#include "core/dispatch/dispatch.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/register.h"
#include "core/ops/samples.h"
#include "core/ops/scan.h"
#include "core/ops/sparse_attributes.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

void check_structure(std::string_view op, MetaSpan in) {
  const Meta &crow = *in[0], &col = *in[1];
  TESSERA_CHECK_AS(ShapeError,
                   crow.dtype == kI64 && col.dtype == kI64 && crow.shape.size() == 1 &&
                       col.shape.size() == 1 && crow.shape[0] >= 1,
                   "{}: rows are i64 crow [M + 1] and i64 col [E], got {}", op, describe(in));
}

// Loops of the operands: rows, edges and columns are whole, that of the dense dim K is given.
struct Loops {
  AxisMap map;
  DimLoops crow, rows, edges, columns, dense;

  Loops(MetaSpan in, int64_t n, int64_t k, Factor::Kind of_dense)
      : crow(loop(Factor::kWhole, in[0]->shape[0])),
        rows(loop(Factor::kWhole, in[0]->shape[0] - 1)),
        edges(loop(Factor::kWhole, in[1]->shape[0])),
        columns(loop(Factor::kWhole, n)),
        dense(loop(of_dense, k)) {
    map.in.push_back({crow}), map.in.push_back({edges});
  }

 private:
  DimLoops loop(Factor::Kind kind, int64_t extent) { return DimLoops{map.add(kind, extent)}; }
};

Tensor product(const Csr& a, const Tensor& values, const Tensor& dense);

// Operands crow, col, values [E], dense [N, K].
void check_product(std::string_view op, MetaSpan in) {
  check_structure(op, in);
  const Meta &values = *in[2], &dense = *in[3];
  TESSERA_CHECK_AS(ShapeError,
                   values.shape == in[1]->shape && dense.shape.size() == 2 &&
                       values.dtype == dense.dtype && is_floating(dense.dtype),
                   "{}: operands {} do not fit; values are [E] as col, dense is [N, K], floats of "
                   "one dtype",
                   op, describe(in));
}

AxisMap product_axes(MetaSpan in, int results) {
  Loops l(in, in[3]->shape[0], in[3]->shape[1], Factor::kPass);
  l.map.in.push_back({l.edges});
  l.map.in.push_back({l.columns, l.dense});
  for (int i = 0; i < results; ++i) l.map.out.push_back({l.rows, l.dense});
  return l.map;
}

class Spmm final : public Primitive {
 public:
  static inline const OpInfo kOp{"spmm", {OpKind::kOther, Precision::kWide, 4}};
  Spmm() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override {
    check_product(name(), in);
    return {Meta::contiguous({in[0]->shape[0] - 1, in[3]->shape[1]}, in[3]->dtype, in[3]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = product_axes(in, 1);
    m.linear_in = 4 | 8;
    return m;
  }
  SaveMask saved() const override { return {15, 0}; }
  Tensors vjp(const VjpArgs& v) const override {
    Csr a{v.in[0], v.in[1]};
    const Tensor &values = v.in[2], &dense = v.in[3], &g = v.cot[0];
    Tensors out(4);
    if (v.wants(2)) out[2] = sddmm(a, g, dense);
    if (v.wants(3)) {
      CsrTranspose t = csr_transpose(a, dense.size(0));
      out[3] = product(t.transposed, index_select(values, 0, t.order), g);
    }
    return out;
  }
};

class SpmmExtreme final : public Primitive {
 public:
  static inline const OpInfo kMax{"spmm_amax", {OpKind::kOther, Precision::kWide, 4}},
      kMin{"spmm_amin", {OpKind::kOther, Precision::kWide, 4}};
  explicit SpmmExtreme(bool largest) : Primitive(largest ? kMax : kMin) {}
  Metas infer(MetaSpan in) const override {
    check_product(name(), in);
    Shape s{in[0]->shape[0] - 1, in[3]->shape[1]};
    return {Meta::contiguous(s, in[3]->dtype, in[3]->device),
            Meta::contiguous(s, kI64, in[3]->device)};
  }
  AxisMap axes(MetaSpan in) const override { return product_axes(in, 2); }
  SaveMask saved() const override { return {2 | 4 | 8, 2}; }
  // Result 1 is the edge that was chosen, -1 for a row without edges.
  Tensors vjp(const VjpArgs& v) const override {
    const Tensor &col = v.in[1], &values = v.in[2], &dense = v.in[3], &at = v.out[1];
    Tensors out(4);
    if (!v.cot[0].defined()) return out;
    if (values.numel() == 0) {
      for (size_t i : {size_t(2), size_t(3)})
        if (v.wants(i)) out[i] = zeros_like(v.in[i]);
      return out;
    }
    Tensor zero = number_beside(dense, 0.0, dense.dtype());
    Tensor g = where(ge(at, 0), v.cot[0], zero), edge = maximum(at, 0), flat = reshape(edge, {-1});
    auto chosen = [&](const Tensor& of_edges) {
      return reshape(index_select(of_edges, 0, flat), at.shape());
    };
    Tensor column = chosen(col);
    if (v.wants(2))
      out[2] = scatter_sum(values, 0, flat, reshape(g * gather(dense, 0, column), {-1}));
    if (v.wants(3)) out[3] = scatter_sum(dense, 0, column, g * chosen(values));
    return out;
  }
};

class Sddmm final : public Primitive {
 public:
  static inline const OpInfo kOp{"sddmm", {OpKind::kOther, Precision::kWide, 4}};
  Sddmm() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override {
    check_structure("sddmm", in);
    const Meta &a = *in[2], &b = *in[3];
    TESSERA_CHECK_AS(ShapeError,
                     a.shape.size() == 2 && b.shape.size() == 2 && a.shape[1] == b.shape[1] &&
                         a.shape[0] == in[0]->shape[0] - 1 && a.dtype == b.dtype &&
                         is_floating(a.dtype),
                     "sddmm: operands {} do not fit; a is [M, K], b is [N, K], floats of one dtype",
                     describe(in));
    return {Meta::contiguous(in[1]->shape, a.dtype, a.device)};
  }
  AxisMap axes(MetaSpan in) const override {
    Loops l(in, in[3]->shape[0], in[3]->shape[1], Factor::kSum);
    l.map.in.push_back({l.rows, l.dense});
    l.map.in.push_back({l.columns, l.dense});
    l.map.out.push_back({l.edges});
    l.map.linear_in = 4 | 8;
    return l.map;
  }
  SaveMask saved() const override { return {15, 0}; }
  Tensors vjp(const VjpArgs& v) const override {
    Csr at{v.in[0], v.in[1]};
    const Tensor &a = v.in[2], &b = v.in[3], &g = v.cot[0];
    Tensors out(4);
    if (v.wants(2)) out[2] = product(at, g, b);
    if (v.wants(3)) {
      CsrTranspose t = csr_transpose(at, b.size(0));
      out[3] = product(t.transposed, index_select(g, 0, t.order), a);
    }
    return out;
  }
};

class CsrTransposeOp final : public PrimitiveOf<CsrTransposeOp, CsrTransposeAttributes> {
 public:
  static inline const OpInfo kOp{"csr_transpose", {OpKind::kOther, Precision::kAsGiven, 2}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    check_structure("csr_transpose", in);
    Device device = in[0]->device;
    return {Meta::contiguous({columns + 1}, kI64, device),
            Meta::contiguous(in[1]->shape, kI64, device),
            Meta::contiguous(in[1]->shape, kI64, device)};
  }
  bool differentiable() const override { return false; }
};

Tensor product(const Csr& a, const Tensor& values, const Tensor& dense) {
  static const PrimRef prim(new Spmm);
  return dispatch1(prim, operands(Tensor(a.crow), Tensor(a.col), Tensor(values), Tensor(dense)));
}

}  // namespace

Tensor spmm_reduce(const Csr& a, const Tensor& values, const Tensor& dense, ScatterReduce how) {
  TESSERA_CHECK(how != ScatterReduce::kProd,
                "spmm_reduce: there is no product over edges; sum, mean, amax or amin");
  Tensor w = values.defined()
                 ? values
                 : ones(a.col.shape(), {.dtype = dense.dtype(), .device = dense.device()});
  if (how == ScatterReduce::kSum) return product(a, w, dense);
  if (how == ScatterReduce::kMean) {
    if (is_floating(dense.dtype()) && size_of(dense.dtype()) == 2)  // rounded to 16 bits once
      return cast(spmm_reduce(a, cast(w, kF32), cast(dense, kF32), how), dense.dtype());
    Tensor total = product(a, w, dense);
    return total / unsqueeze(cast(maximum(diff(a.crow), 1), dense.dtype()), 1);
  }
  static const PrimRef largest(new SpmmExtreme(true)), smallest(new SpmmExtreme(false));
  return dispatch(how == ScatterReduce::kAmax ? largest : smallest,
                  operands(Tensor(a.crow), Tensor(a.col), std::move(w), Tensor(dense)))[0];
}

Tensor sddmm(const Csr& at, const Tensor& a, const Tensor& b) {
  static const PrimRef prim(new Sddmm);
  return dispatch1(prim, operands(Tensor(at.crow), Tensor(at.col), Tensor(a), Tensor(b)));
}

CsrTranspose csr_transpose(const Csr& a, int64_t columns) {
  TESSERA_CHECK(columns >= 0, "csr_transpose: {} columns; expected 0 or more", columns);
  Tensors out =
      dispatch(PrimRef(new CsrTransposeOp({columns})), operands(Tensor(a.crow), Tensor(a.col)));
  return {{out[0], out[1]}, out[2]};
}

void register_sparse_ops(OpRegistry& registry) {
  // Four rows of which one is empty, five columns, one place named twice.
  auto crow = [] { return from_values<int64_t>({0, 3, 3, 4, 7}, {5}); };
  auto col = [] { return from_values<int64_t>({1, 0, 4, 2, 3, 1, 3}, {7}); };
  auto values = [] { return sample_values({7}, -1, 1, 1); };
  auto dense = [](int64_t rows, int64_t k) { return sample_values({rows, k}, -1, 1, 2); };
  registry.add("spmm", [=] {
    return std::vector<Sample>{{PrimRef(new Spmm), {crow(), col(), values(), dense(5, 3)}},
                               {PrimRef(new Spmm), {crow(), col(), values(), dense(5, 1)}}};
  });
  for (bool largest : {true, false})
    registry.add(largest ? "spmm_amax" : "spmm_amin", [=] {
      return std::vector<Sample>{
          {PrimRef(new SpmmExtreme(largest)), {crow(), col(), values(), dense(5, 3)}}};
    });
  registry.add("sddmm", [=] {
    return std::vector<Sample>{
        {PrimRef(new Sddmm), {crow(), col(), sample_values({4, 3}, -1, 1, 3), dense(5, 3)}}};
  });
  registry.add("csr_transpose", [=] {
    return std::vector<Sample>{{PrimRef(new CsrTransposeOp({6})), {crow(), col()}, false}};
  });
}

}  // namespace tessera
