// Layer-norm and rms-norm over the last dim, with their fused derivative.
#include "core/dispatch/dispatch.h"
#include "core/ops/fused.h"
#include "core/ops/fused_attributes.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

Shape rows_of(const Shape& s) {
  Shape r = s;
  r[r.size() - 1] = 1;
  return r;
}
DType stat_type(DType t) { return t == kF64 ? kF64 : kF32; }

// Loops of operands and results by how they relate to x: the same shape, one value a row, or the
// last dim only.
enum class Like : uint8_t { kX, kRow, kLast };
OperandLoops loops_like(Like like, const Shape& x) {
  OperandLoops l = broadcast_loops(x, x);
  if (like == Like::kRow) l[size_t(x.size() - 1)] = {};
  if (like == Like::kLast) return {l[size_t(x.size() - 1)]};
  return l;
}

// Operands: g, x, mean, rstd, then weight where present. Results: dx, then dw and db where wanted.
class NormGrad final : public PrimitiveOf<NormGrad, NormAttributes> {
 public:
  static inline const OpInfo kLayer{"layer_norm_grad", {OpKind::kOther, Precision::kAsGiven, 4}},
      kRms{"rms_norm_grad", {OpKind::kOther, Precision::kAsGiven, 4}};
  int64_t operand_count() const override { return 4 + has_weight; }
  explicit NormGrad(const NormAttributes& a) : PrimitiveOf(a.centred ? kLayer : kRms, a) {}
  Metas infer(MetaSpan in) const override {
    const Shape& x = in[1]->shape;
    Metas out{Meta::contiguous(x, in[1]->dtype, in[1]->device)};
    for (int i = 0; i < int(has_weight) + int(has_bias); ++i)
      out.push_back(Meta::contiguous({x.back()}, in[1]->dtype, in[1]->device));
    return out;
  }
  AxisMap axes(MetaSpan in) const override {
    const Shape& x = in[1]->shape;
    AxisMap m;
    // Rows are summed into dw and db, so they can only pass where there are none.
    bool sums = has_weight || has_bias;
    for (int d = 0; d < x.size(); ++d)
      m.add(d == x.size() - 1 || sums ? Factor::kWhole : Factor::kPass, x[d]);
    m.in.push_back(loops_like(Like::kX, x)), m.in.push_back(loops_like(Like::kX, x));
    m.in.push_back(loops_like(Like::kRow, x)), m.in.push_back(loops_like(Like::kRow, x));
    if (has_weight) m.in.push_back(loops_like(Like::kLast, x));
    m.out.push_back(loops_like(Like::kX, x));
    for (int i = 0; i < int(has_weight) + int(has_bias); ++i)
      m.out.push_back(loops_like(Like::kLast, x));
    m.linear_in = 1;
    return m;
  }
  SaveMask saved() const override { return {31, 0}; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    const Tensor &g = in[0], &x = in[1];
    double n = double(x.size(-1));
    // From x itself, so that differentiating this sees how mean and rstd depend on it.
    Tensor mu = centred ? sum(x, {-1}, true) / n : Tensor(), c = centred ? x - mu : x;
    Tensor scale = rsqrt(sum(square(c), {-1}, true) / n + eps), h = c * scale,
           q = has_weight ? g * in[4] : g;
    Tensor dx = q - h * (sum(q * h, {-1}, true) / n);
    if (centred) dx = dx - sum(q, {-1}, true) / n;
    Tensors out{dx * scale};
    Dims rows;
    for (int d = 0; d + 1 < x.ndim(); ++d) rows.push_back(d);
    auto over_rows = [&](const Tensor& t) { return rows.empty() ? t : sum(t, rows); };
    if (has_weight) out.push_back(over_rows(g * h));
    if (has_bias) out.push_back(over_rows(g));
    return out;
  }
  Tensors vjp(const VjpArgs& v) const override { return vjp_by_decomposition(*this, v); }
};

// Operands: x, then weight, bias where present. Results: y, mean (layer-norm only), rstd.
class Norm final : public PrimitiveOf<Norm, NormAttributes> {
 public:
  static inline const OpInfo kLayer{"layer_norm", {OpKind::kOther, Precision::kWide, 1}},
      kRms{"rms_norm", {OpKind::kOther, Precision::kWide, 1}};
  int64_t operand_count() const override { return 1 + has_weight + has_bias; }
  explicit Norm(const NormAttributes& a) : PrimitiveOf(a.centred ? kLayer : kRms, a) {}
  Metas infer(MetaSpan in) const override {
    const Shape& x = in[0]->shape;
    TESSERA_CHECK_AS(ShapeError, x.size() > 0 && is_floating(in[0]->dtype),
                     "{}: takes floats with at least one dim, got {}", name(), describe(in));
    for (size_t i = 1; i < in.size(); ++i)
      TESSERA_CHECK_AS(ShapeError, in[i]->shape == Shape{x.back()} && in[i]->dtype == in[0]->dtype,
                       "{}: weight and bias must be {}[{}], got {}", name(), name_of(in[0]->dtype),
                       x.back(), describe(in));
    Meta row = Meta::contiguous(rows_of(x), stat_type(in[0]->dtype), in[0]->device);
    return {Meta::contiguous(x, in[0]->dtype, in[0]->device), row, row};
  }
  AxisMap axes(MetaSpan in) const override {
    const Shape& x = in[0]->shape;
    AxisMap m;
    for (int d = 0; d < x.size(); ++d)
      m.add(d == x.size() - 1 ? Factor::kWhole : Factor::kPass, x[d]);
    m.in.push_back(loops_like(Like::kX, x));
    for (size_t i = 1; i < in.size(); ++i) m.in.push_back(loops_like(Like::kLast, x));
    m.out.push_back(loops_like(Like::kX, x)), m.out.push_back(loops_like(Like::kRow, x)),
        m.out.push_back(loops_like(Like::kRow, x));
    return m;
  }
  SaveMask saved() const override { return {has_weight ? 3u : 1u, 6}; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    Tensor x = cast(in[0], stat_type(in[0].dtype())), mu = mean(x, {-1}, true),
           c = centred ? x - mu : x;
    Tensor scale = rsqrt(mean(square(c), {-1}, true) + eps), y = cast(c * scale, in[0].dtype());
    if (has_weight) y = y * in[1];
    if (has_bias) y = y + in[has_weight ? 2 : 1];
    return {y, centred ? mu : mu * 0.0, scale};
  }
  Tensors vjp(const VjpArgs& v) const override {
    TESSERA_CHECK(!(v.cot[1].defined() || v.cot[2].defined()),
                  "{}: not differentiable through mean and rstd", name());
    if (!v.cot[0].defined()) return Tensors(v.in.size());
    bool db = has_bias && v.wants(has_weight ? 2 : 1);
    Tensors in{v.cot[0], v.in[0], v.out[1], v.out[2]};
    if (has_weight) in.push_back(v.in[1]);
    Tensors g = dispatch(PrimRef(new NormGrad({eps, centred, has_weight, has_bias && db})), in);
    if (has_bias && !db) g.push_back(Tensor());
    return g;
  }
};

Tensor normalize_rows(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                      bool centred) {
  Tensors in{x};
  if (weight.defined()) in.push_back(weight);
  if (bias.defined()) in.push_back(bias);
  return dispatch1(PrimRef(new Norm({eps, centred, weight.defined(), bias.defined()})), in);
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return normalize_rows(x, weight, bias, eps, true);
}
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return normalize_rows(x, weight, {}, eps, false);
}

void register_norm_ops(OpRegistry& registry) {
  for (bool centred : {true, false}) {
    registry.add((centred ? Norm::kLayer : Norm::kRms).name, [centred] {
      Tensor x = sample_values({2, 3, 5}, -2, 2, 1), w = sample_values({5}, 0.5, 2, 2),
             b = sample_values({5}, -1, 1, 3);
      std::vector<Sample> s{{PrimRef(new Norm({1e-5, centred, true, false})), {x, w}},
                            {PrimRef(new Norm({1e-5, centred, false, false})), {x}}};
      if (centred) s.push_back({PrimRef(new Norm({1e-5, centred, true, true})), {x, w, b}});
      return s;
    });
    registry.add((centred ? NormGrad::kLayer : NormGrad::kRms).name, [centred] {
      Tensor x = sample_values({3, 5}, -2, 2, 1), w = sample_values({5}, 0.5, 2, 2),
             g = sample_values({3, 5}, -1, 1, 3);
      Tensors out = dispatch(PrimRef(new Norm({1e-5, centred, false, false})), operands(Tensor(x)));
      // mean and rstd are functions of x: moving them alone means nothing, so finite differences do
      // not apply.
      return std::vector<Sample>{
          {PrimRef(new NormGrad({1e-5, centred, true, centred})), {g, x, out[1], out[2], w}, false},
          {PrimRef(new NormGrad({1e-5, centred, false, false})), {g, x, out[1], out[2]}, false}};
    });
  }
}

}  // namespace tessera
