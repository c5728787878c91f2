// Embedding: rows of a table, and the scatter of their cotangents. A table split by rows needs the
// row offset of its part, which localize supplies; ids outside the part then give zeros, terms of a
// sum over the parts.
#include "core/dispatch/dispatch.h"
#include "core/ops/fused.h"
#include "core/ops/fused_attributes.h"
#include "core/ops/samples.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

// Operands g [.., D], ids [..]; result [rows, D].
class EmbeddingGrad final : public PrimitiveOf<EmbeddingGrad, EmbeddingAttributes> {
 public:
  static inline const OpInfo kOp{"embedding_grad", {OpKind::kOther, Precision::kAsGiven, 2}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    return {Meta::contiguous({rows, in[0]->shape.back()}, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    const Shape& ids = in[1]->shape;
    AxisMap m;
    for (int64_t e : ids) m.add(Factor::kSum, e);
    int v = m.add(Factor::kPass, rows), d = m.add(Factor::kPass, in[0]->shape.back());
    OperandLoops l = broadcast_loops(ids, ids), g = l;
    g.push_back({d});
    m.in.push_back(g), m.in.push_back(l);
    m.out.push_back({{v}, {d}});
    m.linear_in = 1;
    return m;
  }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const override {
    Range part = range_of(map.out[0][0], loops);
    return PrimRef(new EmbeddingGrad({part.size, padding_idx, part.begin, part.extent}));
  }
  SaveMask saved() const override { return {2, 0}; }
  Tensors vjp(const VjpArgs& v) const override;
};

// Operands ids [..], table [rows, D]; result [.., D].
class Embedding final : public PrimitiveOf<Embedding, EmbeddingAttributes> {
 public:
  static inline const OpInfo kOp{"embedding", {OpKind::kOther, Precision::kAsGiven, 2}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    TESSERA_CHECK_AS(ShapeError,
                     in[1]->shape.size() == 2 && (in[0]->dtype == kI64 || in[0]->dtype == kI32),
                     "embedding: takes integer ids and a table [V, D], got {}", describe(in));
    Shape s = in[0]->shape;
    s.push_back(in[1]->shape[1]);
    return {Meta::contiguous(s, in[1]->dtype, in[1]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    const Shape& ids = in[0]->shape;
    AxisMap m;
    for (int64_t e : ids) m.add(Factor::kPass, e);
    int v = m.add(Factor::kSum, rows), d = m.add(Factor::kPass, in[1]->shape[1]);
    OperandLoops l = broadcast_loops(ids, ids), out = l;
    out.push_back({d});
    m.in.push_back(l);
    m.in.push_back({{v}, {d}});
    m.out.push_back(out);
    m.linear_in = 2;
    return m;
  }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const override {
    Range part = range_of(map.in[1][0], loops);
    return PrimRef(new Embedding({part.size, padding_idx, part.begin, part.extent}));
  }
  SaveMask saved() const override { return {1, 0}; }
  Tensors vjp(const VjpArgs& v) const override {
    return {Tensor(), dispatch_into(v.grad_buffer_of(1),
                                    PrimRef(new EmbeddingGrad({rows, padding_idx, begin, extent})),
                                    operands(Tensor(v.cot[0]), Tensor(v.in[0])))};
  }
};

Tensors EmbeddingGrad::vjp(const VjpArgs& v) const {
  TESSERA_CHECK(padding_idx < 0, "embedding_grad: no second derivative with padding_idx");
  return {dispatch1(PrimRef(new Embedding({rows, -1, begin, extent})),
                    operands(Tensor(v.in[1]), Tensor(v.cot[0]))),
          Tensor()};
}

}  // namespace

Tensor embedding(const Tensor& ids, const Tensor& table, int64_t padding_idx) {
  TESSERA_CHECK_AS(ShapeError, table.ndim() == 2, "embedding: the table must be [V, D], got {}",
                   describe(table));
  TESSERA_CHECK(padding_idx >= -1 && padding_idx < table.shape()[0],
                "embedding: padding_idx {} is not a row of the table {}; -1 for none", padding_idx,
                describe(table));
  return dispatch1(PrimRef(new Embedding({table.shape()[0], padding_idx})),
                   operands(Tensor(ids), Tensor(table)));
}

void register_embedding_ops(OpRegistry& registry) {
  registry.add("embedding", [] {
    return std::vector<Sample>{
        {PrimRef(new Embedding({6, -1})),
         {sample_integers({2, 4}, 0, 6, 1), sample_values({6, 3}, -1, 1, 2)}},
        {PrimRef(new Embedding({6, -1})),
         {sample_integers({5}, 0, 6, 1), sample_values({6, 3}, -1, 1, 2)}},
        // Extents that say nothing of which loop is the table's: a square table, as many ids as
        // rows.
        {PrimRef(new Embedding({4, -1})),
         {sample_integers({4}, 0, 4, 1), sample_values({4, 4}, -1, 1, 2)}},
        {PrimRef(new Embedding({4, -1})),
         {sample_integers({4}, 0, 4, 1), sample_values({4, 1}, -1, 1, 2)}},
        {PrimRef(new Embedding({1, -1})),
         {sample_integers({3, 1}, 0, 1, 1), sample_values({1, 3}, -1, 1, 2)}}};
  });
  registry.add("embedding_grad", [] {
    return std::vector<Sample>{
        {PrimRef(new EmbeddingGrad({6, -1})),
         {sample_values({2, 4, 3}, -1, 1, 2), sample_integers({2, 4}, 0, 6, 1)}},
        {PrimRef(new EmbeddingGrad({4, -1})),
         {sample_values({4, 4}, -1, 1, 2), sample_integers({4}, 0, 4, 1)}},
        {PrimRef(new EmbeddingGrad({4, 2})),
         {sample_values({4, 1}, -1, 1, 2), sample_integers({4}, 0, 4, 1)},
         false},
        {PrimRef(new EmbeddingGrad({1, -1})),
         {sample_values({3, 1, 3}, -1, 1, 2), sample_integers({3, 1}, 0, 1, 1)}}};
  });
}

}  // namespace tessera
