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

// Throws unless `mask` is one of scores of this shape.
void check_mask(const Meta& mask, const Shape& scores) {
  const Meta* described[] = {&mask};
  TESSERA_CHECK(
      mask.dtype == kBool || is_floating(mask.dtype),
      "scaled_dot_product_attention: the mask is {}; give bools (true: attend) or floats, "
      "which are added to scores",
      describe(described));
  bool fits = mask.shape.size() <= 4;
  for (int d = 0; fits && d < mask.shape.size(); ++d) {
    const int64_t extent = mask.shape[d], whole = scores[d + 4 - mask.shape.size()];
    fits = extent == 1 || extent == whole;
  }
  TESSERA_CHECK_AS(ShapeError, fits,
                   "scaled_dot_product_attention: the mask {} does not broadcast to scores {}",
                   describe(described), to_string(scores));
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

// The scores [B, H, T, S] with -inf where a query does not attend; `mask` may be undefined.
Tensor masked(Tensor scores, bool causal, const Tensor& mask) {
  Tensor low = number_beside(scores, -INFINITY, scores.dtype());
  if (causal)
    scores = where(causal_mask(scores.size(2), scores.size(3), scores.device()), scores, low);
  if (!mask.defined()) return scores;
  return mask.dtype() == kBool ? where(mask, scores, low) : scores + mask;
}
// Which rows of masked scores attend to no key.
Tensor attends_to_none(const Tensor& scores) {
  return eq(amax(scores.detach(), {-1}, true), number_beside(scores, -INFINITY, scores.dtype()));
}
// The weights. With a mask a query may attend to no key and gets zeros; softmax would be 0 / 0.
Tensor weights_of(const Tensor& scores, bool has_mask) {
  if (!has_mask) return softmax(scores);
  Tensor nothing = attends_to_none(scores), none = number_beside(scores, 0.0, scores.dtype());
  return where(nothing, none, softmax(where(nothing, none, scores)));
}

Tensor plain_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& o,
                       double scale) {
  Scoped<bool> same(context().replicate_plain, true);  // masks are, on every rank
  Tensor scores = masked(contract("bhtd,bhsd->bhts", q * scale, k), o.causal, o.mask);
  Tensor weights = weights_of(scores, o.mask.defined());
  if (o.dropout > 0) weights = dropout(weights, o.dropout);
  return contract("bhts,bhse->bhte", weights, v);
}

// ---- the primitives

// Scores as the primitives have them, in the dtype of q.
Tensor scores_of(const AttentionAttributes& a, const Tensor& q, const Tensor& k,
                 const Tensor& mask) {
  Tensor scores = contract("bhtd,bhsd->bhts", q, k) * a.scale;
  if (mask.defined() && mask.dtype() != kBool) {
    Tensor least = number_beside(mask, AttentionAttributes::kLeastMask, mask.dtype());
    scores = masked(scores, false, ge(mask, least)) + cast(maximum(mask, least), q.dtype());
    return masked(scores, a.causal, {});
  }
  return masked(scores, a.causal, mask);
}

// The gradients of q, k and v by the cotangent g, and that of the mask where `of_mask` says so.
// From q, k, v and the mask alone, so that differentiating this sees how the weights depend on
// them.
Tensors plain_gradients(const AttentionAttributes& a, const Tensor& g, const Tensor& q,
                        const Tensor& k, const Tensor& v, const Tensor& mask, bool of_mask) {
  Tensor p = weights_of(scores_of(a, q, k, mask), mask.defined()),
         dp = contract("bhte,bhse->bhts", g, v), ds = p * (dp - sum(dp * p, {-1}, true)),
         scaled = ds * a.scale;
  Tensors all{contract("bhts,bhsd->bhtd", scaled, k), contract("bhts,bhtd->bhsd", scaled, q),
              contract("bhts,bhte->bhse", p, g)};
  if (of_mask) all.push_back(cast(sum_to(ds, mask.shape()), mask.dtype()));
  return all;
}

Tensor mask_among(const AttentionAttributes& a, std::span<const Tensor> in) {
  return a.has_mask ? in.back() : Tensor();
}

// The loops of attention: b and h pass, everything else is whole on a rank.
struct Loops {
  AxisMap map;
  int b, h, t, s, d, e;
  Shape scores;
  Loops(const Shape& q, const Shape& v) : scores{q[0], q[1], q[2], v[2]} {
    b = map.add(Factor::kPass, q[0]), h = map.add(Factor::kPass, q[1]);
    t = map.add(Factor::kWhole, q[2]), s = map.add(Factor::kWhole, v[2]);
    d = map.add(Factor::kWhole, q[3]), e = map.add(Factor::kWhole, v[3]);
  }
  OperandLoops operand(int x, int y) { return {{b}, {h}, {x}, {y}}; }
  OperandLoops row() { return {{b}, {h}, {t}}; }
  OperandLoops mask(const Shape& of_mask) { return broadcast_loops(of_mask, scores); }
};

// Operands g, q, k, v, out, lse and maybe a mask; results dq, dk, dv.
class FlashGrad final : public PrimitiveOf<FlashGrad, AttentionAttributes> {
 public:
  static inline const OpInfo kOp{"attention_grad", {OpKind::kProduct, Precision::kAsGiven, 6}};
  using PrimitiveOf::PrimitiveOf;
  int64_t operand_count() const override { return 6 + has_mask; }
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
    if (has_mask) l.map.in.push_back(l.mask(in[6]->shape));
    l.map.out = {l.operand(l.t, l.d), l.operand(l.s, l.d)};
    l.map.out.push_back(l.operand(l.s, l.e));
    l.map.linear_in = 1;
    return l.map;
  }
  SaveMask saved() const override { return {63u | uint32_t(has_mask) << 6, 0}; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    return plain_gradients(*this, in[0], in[1], in[2], in[3], mask_among(*this, in), false);
  }
  Tensors vjp(const VjpArgs& v) const override { return vjp_by_decomposition(*this, v); }
};

// Operands q, k, v and maybe a mask; results out and lse [B, H, T], the log of each row's sum of
// exponentials. That is +inf for a query that attends to no key, so that exp(score - lse) is its
// weights, zeros.
class Flash final : public PrimitiveOf<Flash, AttentionAttributes> {
 public:
  static inline const OpInfo kOp{"attention", {OpKind::kProduct, Precision::kLow, 3}};
  using PrimitiveOf::PrimitiveOf;
  int64_t operand_count() const override { return 3 + has_mask; }
  Metas infer(MetaSpan in) const override {
    const Shape &q = in[0]->shape, &v = in[2]->shape;
    if (has_mask) check_mask(*in[3], {q[0], q[1], q[2], v[2]});
    return {
        Meta::contiguous({q[0], q[1], q[2], v[3]}, in[0]->dtype, in[0]->device),
        Meta::contiguous({q[0], q[1], q[2]}, in[0]->dtype == kF64 ? kF64 : kF32, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    Loops l(in[0]->shape, in[2]->shape);
    l.map.in = {l.operand(l.t, l.d), l.operand(l.s, l.d), l.operand(l.s, l.e)};
    if (has_mask) l.map.in.push_back(l.mask(in[3]->shape));
    l.map.out = {l.operand(l.t, l.e), l.row()};
    return l.map;
  }
  SaveMask saved() const override { return {7u | uint32_t(has_mask) << 3, 3}; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    Tensor scores = scores_of(*this, in[0], in[1], mask_among(*this, in));
    Tensor wide = cast(scores, in[0].dtype() == kF64 ? kF64 : kF32), lse = logsumexp(wide, {-1});
    if (has_mask)
      lse = where(eq(lse, number_beside(lse, -INFINITY, lse.dtype())),
                  number_beside(lse, INFINITY, lse.dtype()), lse);
    return {contract("bhts,bhse->bhte", weights_of(scores, has_mask), in[2]), lse};
  }
  Tensors vjp(const VjpArgs& v) const override {
    TESSERA_CHECK(!v.cot[1 % v.cot.size()].defined() || v.cot.size() == 1,
                  "attention: not differentiable through the log-sum-exp");
    if (has_mask && v.in[3].dtype() != kBool && v.wants(3))
      return plain_gradients(*this, v.cot[0], v.in[0], v.in[1], v.in[2], v.in[3], true);
    Tensors in{v.cot[0], v.in[0], v.in[1], v.in[2], v.out[0], v.out[1]};
    if (has_mask) in.push_back(v.in[3]);
    Tensors all = dispatch(PrimRef(new FlashGrad(attributes_of<AttentionAttributes>(*this))), in);
    all.resize(v.in.size());
    return all;
  }
};

// The mask as the op takes it, for scores [B, H, T, S].
Tensor of_four_dims(Tensor mask) {
  while (mask.ndim() < 4) mask = unsqueeze(mask, 0);
  return mask;
}

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
  if (o.mask.defined()) check_mask(o.mask.meta(), {q.size(0), q.size(1), q.size(2), k.size(2)});
  bool flash_fits = o.dropout == 0 && q.numel() > 0 && k.numel() > 0;
  TESSERA_CHECK(o.kernel != AttentionKernel::kFlash || flash_fits,
                "scaled_dot_product_attention: the flash kernel takes neither dropout nor empty "
                "operands; choose kAuto or kPlain");
  if (o.kernel == AttentionKernel::kPlain || !flash_fits)
    return plain_attention(q, in[1], in[2], o, scale);  // scales q in its own dtype
  if (!o.mask.defined()) return dispatch1(PrimRef(new Flash({scale, o.causal})), in);
  Scoped<bool> same(context().replicate_plain, true);  // the mask is, on every rank
  return dispatch(PrimRef(new Flash({scale, o.causal, true})),
                  operands(Tensor(in[0]), Tensor(in[1]), Tensor(in[2]), of_four_dims(o.mask)))[0];
}

void register_attention_ops(OpRegistry& registry) {
  auto q = [] { return sample_values({2, 2, 5, 3}, -1, 1, 1); };
  auto k = [] { return sample_values({2, 2, 5, 3}, -1, 1, 2); };
  auto v = [] { return sample_values({2, 2, 5, 4}, -1, 1, 3); };
  // Nothing, causal, keys of which some are padding, and all of one sequence, and numbers for each
  // query and head.
  struct Variant {
    bool causal;
    Tensor mask;
  };
  auto variants = [] {
    return std::vector<Variant>{
        {false, {}},
        {true, {}},
        {false, lt(arange(0, 5), from_values<int64_t>({4, 0}, {2, 1, 1, 1}))},
        {true, sample_values({1, 2, 5, 5}, -1, 1, 6)}};
  };
  auto with = [](std::vector<Tensor> in, const Tensor& mask) {
    if (mask.defined()) in.push_back(mask);
    return in;
  };
  registry.add("attention", [=] {
    std::vector<Sample> s;
    for (auto& [causal, mask] : variants())
      s.push_back({PrimRef(new Flash({0.5, causal, mask.defined()})), with({q(), k(), v()}, mask)});
    return s;
  });
  registry.add("attention_grad", [=] {
    std::vector<Sample> s;
    for (auto& [causal, mask] : variants()) {
      const AttentionAttributes a{0.5, causal, mask.defined()};
      std::vector<Tensor> in = with({q(), k(), v()}, mask);
      Tensors out = dispatch(PrimRef(new Flash(a)), in);
      // out and lse are functions of q, k, v: perturbing one alone means nothing, so finite
      // differences do not apply.
      s.push_back(
          {PrimRef(new FlashGrad(a)),
           with({sample_values({2, 2, 5, 4}, -1, 1, 4), q(), k(), v(), out[0], out[1]}, mask),
           false});
    }
    return s;
  });
}

}  // namespace tessera
