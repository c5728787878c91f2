// Scaled dot-product attention: the plain form in ordinary ops, and the choice between it and the
// tiled kernel.
#include <array>
#include <cmath>

#include "core/dispatch/context.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/precision.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/fused_attributes.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

// B batch, H heads, T query positions, S key positions, D width, E value width.
void check_shapes(const Tensor& q, const Tensor& k, const Tensor& v) {
  bool ok = q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4 && q.size(0) == k.size(0) &&
            q.size(1) == k.size(1) && q.size(3) == k.size(3) && v.size(0) == k.size(0) &&
            v.size(1) == k.size(1) && v.size(2) == k.size(2);
  TESSERA_CHECK_AS(ShapeError, ok,
                   "scaled_dot_product_attention: takes q [B, H, T, D], k [B, H, S, D], v [B, H, "
                   "S, E], got {}, {}, {}",
                   describe(q), describe(k), describe(v));
}

// Casts q, k and v to one dtype: autocast's where it is on, then the one in which they meet.
std::array<Tensor, 3> of_one_dtype(const Tensor& q, const Tensor& k, const Tensor& v) {
  std::array<Tensor, 3> in = {q, k, v};
  if (k.dtype() != q.dtype() || v.dtype() != q.dtype()) autocast_operands(Precision::kLow, in);
  const DType t = in[0].dtype();
  TESSERA_CHECK(is_floating(t) && in[1].dtype() == t && in[2].dtype() == t,
                "scaled_dot_product_attention: takes floats of one dtype, got {}, {}, {}",
                describe(q), describe(k), describe(v));
  return in;
}

// x [B, H, S, D] -> [B, heads, S, D]: each of the H heads is repeated heads / H times in a row.
Tensor repeat_heads(const Tensor& x, int64_t heads) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() == 4 && x.size(1) > 0 && heads % x.size(1) == 0,
                   "scaled_dot_product_attention: {} heads of q are no multiple of those of {}",
                   heads, describe(x));
  const int64_t times = heads / x.size(1);
  if (times == 1) return x;
  return flatten(expand(unsqueeze(x, 2), {-1, -1, times, -1, -1}), 1, 2);
}

Tensor causal_mask(int64_t queries, int64_t keys, Device device) {
  Tensor row = unsqueeze(arange(0, queries, 1, {.device = device}), 1),
         column = arange(0, keys, 1, {.device = device});
  return le(column, row);
}

Tensor plain_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& o,
                       double scale) {
  Scoped<bool> same(context().replicate_plain, true);  // masks are, on every rank
  Tensor scores = contract("bhtd,bhsd->bhts", q * scale, k),
         low = number_beside(q, -INFINITY, q.dtype());
  if (o.causal) scores = where(causal_mask(q.size(2), k.size(2), q.device()), scores, low);
  if (o.mask.defined())
    scores = o.mask.dtype() == kBool ? where(o.mask, scores, low) : scores + o.mask;
  Tensor weights;
  if (o.mask.defined()) {  // a query that may attend to no key gets zeros; softmax would be 0 / 0
    Tensor nothing = eq(amax(scores.detach(), {-1}, true), low);
    Tensor none = number_beside(q, 0.0, q.dtype());
    weights = where(nothing, none, softmax(where(nothing, none, scores)));
  } else {
    weights = softmax(scores);
  }
  if (o.dropout > 0) weights = dropout(weights, o.dropout);
  return contract("bhts,bhse->bhte", weights, v);
}

// The loops of attention: b and h pass, everything else is whole on a rank.
struct Loops {
  AxisMap map;
  int b, h, t, s, d, e;
  Loops(const Shape& q, const Shape& v) {
    b = map.add(Factor::kPass, q[0]), h = map.add(Factor::kPass, q[1]);
    t = map.add(Factor::kWhole, q[2]), s = map.add(Factor::kWhole, v[2]);
    d = map.add(Factor::kWhole, q[3]), e = map.add(Factor::kWhole, v[3]);
  }
  OperandLoops operand(int x, int y) { return {{b}, {h}, {x}, {y}}; }
  OperandLoops row() { return {{b}, {h}, {t}}; }
};

// Operands g, q, k, v, out, lse; results dq, dk, dv.
class FlashGrad final : public PrimitiveOf<FlashGrad, AttentionAttributes> {
 public:
  static inline const OpInfo kOp{"attention_grad", {OpKind::kProduct, Precision::kAsGiven, 6}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    Metas out;
    for (int i = 1; i <= 3; ++i)
      out.push_back(
          Meta::contiguous(in[size_t(i)]->shape, in[size_t(i)]->dtype, in[size_t(i)]->device));
    return out;
  }
  AxisMap axes(MetaSpan in) const override {
    Loops l(in[1]->shape, in[3]->shape);
    l.map.in = {l.operand(l.t, l.e), l.operand(l.t, l.d), l.operand(l.s, l.d),
                l.operand(l.s, l.e), l.operand(l.t, l.e), l.row()};
    l.map.out = {l.operand(l.t, l.d), l.operand(l.s, l.d)};
    l.map.out.push_back(l.operand(l.s, l.e));
    l.map.linear_in = 1;
    return l.map;
  }
  SaveMask saved() const override { return {63, 0}; }
  bool decomposable() const override { return true; }
  // From q, k and v alone, so that differentiating this sees how out and lse depend on them.
  Tensors decompose(std::span<const Tensor> in) const override {
    const Tensor &g = in[0], &q = in[1], &k = in[2], &v = in[3];
    Tensor scores = contract("bhtd,bhsd->bhts", q, k) * scale;
    if (causal)
      scores = where(causal_mask(q.size(2), k.size(2), q.device()), scores,
                     number_beside(q, -INFINITY, q.dtype()));
    Tensor p = softmax(scores), dp = contract("bhte,bhse->bhts", g, v),
           ds = p * (dp - sum(dp * p, {-1}, true)) * scale;
    return {contract("bhts,bhsd->bhtd", ds, k), contract("bhts,bhtd->bhsd", ds, q),
            contract("bhts,bhte->bhse", p, g)};
  }
  Tensors vjp(const VjpArgs& v) const override { return vjp_by_decomposition(*this, v); }
};

// Operands q, k, v; results out and lse [B, H, T], the log of each row's sum of exponentials.
class Flash final : public PrimitiveOf<Flash, AttentionAttributes> {
 public:
  static inline const OpInfo kOp{"attention", {OpKind::kProduct, Precision::kLow, 3}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    const Shape &q = in[0]->shape, &v = in[2]->shape;
    return {
        Meta::contiguous({q[0], q[1], q[2], v[3]}, in[0]->dtype, in[0]->device),
        Meta::contiguous({q[0], q[1], q[2]}, in[0]->dtype == kF64 ? kF64 : kF32, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    Loops l(in[0]->shape, in[2]->shape);
    l.map.in = {l.operand(l.t, l.d), l.operand(l.s, l.d), l.operand(l.s, l.e)};
    l.map.out = {l.operand(l.t, l.e), l.row()};
    return l.map;
  }
  SaveMask saved() const override { return {7, 3}; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    Tensor scores = contract("bhtd,bhsd->bhts", in[0], in[1]) * scale;
    if (causal)
      scores = where(causal_mask(in[0].size(2), in[1].size(2), in[0].device()), scores,
                     number_beside(in[0], -INFINITY, in[0].dtype()));
    Tensor wide = cast(scores, in[0].dtype() == kF64 ? kF64 : kF32);
    return {contract("bhts,bhse->bhte", softmax(scores), in[2]), logsumexp(wide, {-1})};
  }
  Tensors vjp(const VjpArgs& v) const override {
    TESSERA_CHECK(!v.cot[1 % v.cot.size()].defined() || v.cot.size() == 1,
                  "attention: not differentiable through the log-sum-exp");
    return dispatch(PrimRef(new FlashGrad({scale, causal})),
                    operands(Tensor(v.cot[0]), Tensor(v.in[0]), Tensor(v.in[1]), Tensor(v.in[2]),
                             Tensor(v.out[0]), Tensor(v.out[1])));
  }
};

}  // namespace

Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const AttentionOptions& o) {
  if (q.ndim() == 3)
    return squeeze(
        scaled_dot_product_attention(unsqueeze(q, 0), unsqueeze(k, 0), unsqueeze(v, 0), o), 0);
  if (o.enable_gqa && q.ndim() == 4) {
    AttentionOptions plain = o;
    plain.enable_gqa = false;
    return scaled_dot_product_attention(q, repeat_heads(k, q.size(1)), repeat_heads(v, q.size(1)),
                                        plain);
  }
  check_shapes(q, k, v);
  std::array<Tensor, 3> in = of_one_dtype(q, k, v);
  double scale = o.scale != 0 ? o.scale : 1 / std::sqrt(double(q.size(3)));
  bool flash_fits = !o.mask.defined() && o.dropout == 0 && q.numel() > 0 && k.numel() > 0;
  TESSERA_CHECK(o.kernel != AttentionKernel::kFlash || flash_fits,
                "scaled_dot_product_attention: the flash kernel takes neither a mask nor dropout; "
                "choose kAuto or kPlain");
  if (o.kernel == AttentionKernel::kPlain || !flash_fits)
    return plain_attention(q, in[1], in[2], o, scale);  // scales q in its own dtype
  return dispatch1(PrimRef(new Flash({scale, o.causal})), in);
}

void register_attention_ops(OpRegistry& registry) {
  auto q = [] { return sample_values({2, 2, 5, 3}, -1, 1, 1); };
  auto k = [] { return sample_values({2, 2, 5, 3}, -1, 1, 2); };
  auto v = [] { return sample_values({2, 2, 5, 4}, -1, 1, 3); };
  registry.add("attention", [=] {
    return std::vector<Sample>{{PrimRef(new Flash({0.5, false})), {q(), k(), v()}},
                               {PrimRef(new Flash({0.5, true})), {q(), k(), v()}}};
  });
  registry.add("attention_grad", [=] {
    std::vector<Sample> s;
    for (bool causal : {false, true}) {
      Tensors out = dispatch(PrimRef(new Flash({0.5, causal})), operands(q(), k(), v()));
      // out and lse are functions of q, k, v: perturbing one alone means nothing, so finite
      // differences do not apply.
      s.push_back({PrimRef(new FlashGrad({0.5, causal})),
                   {sample_values({2, 2, 5, 4}, -1, 1, 4), q(), k(), v(), out[0], out[1]},
                   false});
    }
    return s;
  });
}

}  // namespace tessera
