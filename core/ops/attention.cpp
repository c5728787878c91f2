// Scaled dot-product attention: the plain form in ordinary ops, and the choice between it and the
// tiled kernel. Invariant: both drop the same weights.
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
  if (mask.dtype() == kBool) return where(mask, scores, low);
  const Tensor least = number_beside(mask, AttentionAttributes::kLeastMask, mask.dtype());
  return where(ge(mask, least), scores, low) + maximum(mask, least);
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
  Tensor scores = contract("bhtd,bhsd->bhts", q * scale, k);
  const DType t = scores.dtype();  // numbers of a mask may be wider
  Tensor weights = cast(weights_of(masked(scores, o.causal, o.mask), o.mask.defined()), t);
  if (o.dropout > 0) weights = dropout(weights, o.dropout);
  return contract("bhts,bhse->bhte", weights, v);
}

// ---- the primitives

// Scores as the primitives have them, in the dtype of q.
Tensor scores_of(const AttentionAttributes& a, const Tensor& q, const Tensor& k,
                 const Tensor& mask) {
  Tensor scores = contract("bhtd,bhsd->bhts", q, k) * a.scale;
  return cast(masked(scores, a.causal, mask), q.dtype());
}

// What the weights drop, or they as they are.
Tensor dropped(const AttentionAttributes& a, const Tensor& weights, const AttentionFurther& more) {
  return a.drops() ? apply_dropout(a.drop, weights, {more.key, more.samples}) : weights;
}

// The gradients of q, k and v by the cotangent g, and that of the mask where `of_mask` says so.
// From q, k, v and the mask alone, so that differentiating this sees how the weights depend on
// them.
Tensors plain_gradients(const AttentionAttributes& a, const Tensor& g, const Tensor& q,
                        const Tensor& k, const Tensor& v, const AttentionFurther& more,
                        bool of_mask) {
  Tensor p = weights_of(scores_of(a, q, k, more.mask), more.mask.defined()),
         dp = dropped(a, contract("bhte,bhse->bhts", g, v), more),
         ds = p * (dp - sum(dp * p, {-1}, true)), scaled = ds * a.scale;
  Tensors all{contract("bhts,bhsd->bhtd", scaled, k), contract("bhts,bhtd->bhsd", scaled, q),
              contract("bhts,bhte->bhse", dropped(a, p, more), g)};
  if (of_mask) all.push_back(cast(sum_to(ds, more.mask.shape()), more.mask.dtype()));
  return all;
}

void check_dropout(const AttentionAttributes& a) {
  const DropoutAttributes& d = a.drop;
  TESSERA_CHECK(d.p >= 0 && d.p < 1 && (a.drops() || !d.by_sample) && d.begin.size() % 4 == 0 &&
                    d.begin.size() <= 4 && d.begin.size() == d.global.size(),
                "attention: dropout {}, by sample {}, of scores from {} on of {}; takes 0 <= p < "
                "1, samples with dropout alone, and no or four numbers of each",
                d.p, d.by_sample, to_string(d.begin), to_string(d.global));
}
// Throws unless the last operands draw the weights of a batch of this many.
void check_draw(const AttentionAttributes& a, MetaSpan in, int64_t batch) {
  if (!a.drops()) return;
  const Meta &key = *in[in.size() - 1 - a.drop.by_sample], &samples = *in.back();
  TESSERA_CHECK_AS(ShapeError, key.shape == Shape{2} && key.dtype == kI64,
                   "attention: the key must be i64[2], got {}", describe(in));
  TESSERA_CHECK_AS(
      ShapeError,
      !a.drop.by_sample || (samples.dtype == kI64 && samples.shape.size() == 1 &&
                            (samples.shape[0] == 0 ? batch == 0 : batch % samples.shape[0] == 0)),
      "attention: sample numbers must be i64 [N] with N dividing the batch, got {}", describe(in));
}

// The loops of attention: b and h pass, everything else is whole on a rank. The batch is whole too
// where several rows of it are one sample of dropout.
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
  // The last operands.
  void further(const AttentionAttributes& a, MetaSpan in) {
    size_t at = in.size() - size_t(a.further());
    if (a.has_mask) map.in.push_back(broadcast_loops(in[at++]->shape, scores));
    if (a.drops()) map.in.push_back({DimLoops{map.add(Factor::kWhole, 2)}});
    if (!a.drop.by_sample) return;
    const int64_t samples = in.back()->shape[0];
    if (samples == scores[0]) {
      map.in.push_back({{b}});
    } else {
      map.factors[size_t(b)].kind = Factor::kWhole;
      map.in.push_back({DimLoops{map.add(Factor::kWhole, samples)}});
    }
  }
};

// The attributes of the part of the loops that a rank holds, of which operand `q` of the map and
// the next are q and k: it drops what the whole would.
AttentionAttributes local_attributes(AttentionAttributes a, const AxisMap& map, size_t q,
                                     std::span<const Range> loops) {
  const DimLoops* scores[] = {&map.in[q][0], &map.in[q][1], &map.in[q][2], &map.in[q + 1][2]};
  a.drop.begin = {}, a.drop.global = {};
  for (const DimLoops* dim : scores) {
    const Range r = range_of(*dim, loops);
    a.drop.begin.push_back(r.begin), a.drop.global.push_back(r.extent);
  }
  return a;
}

// Operands g, q, k, v, out, lse and the further ones; results dq, dk, dv.
class FlashGrad final : public PrimitiveOf<FlashGrad, AttentionAttributes> {
 public:
  static inline const OpInfo kOp{"attention_grad", {OpKind::kProduct, Precision::kAsGiven, 6}};
  using PrimitiveOf::PrimitiveOf;
  static void check_attributes(const AttentionAttributes& a) { check_dropout(a); }
  int64_t operand_count() const override { return 6 + further(); }
  bool draws() const override { return drops(); }
  Metas infer(MetaSpan in) const override {
    check_draw(*this, in, in[1]->shape[0]);
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
    l.further(*this, in);
    l.map.out = {l.operand(l.t, l.d), l.operand(l.s, l.d)};
    l.map.out.push_back(l.operand(l.s, l.e));
    l.map.linear_in = 1;
    return l.map;
  }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const override {
    return drops() ? PrimRef(new FlashGrad(local_attributes(*this, map, 1, loops))) : nullptr;
  }
  SaveMask saved() const override { return {(64u << further()) - 1, 0}; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    return plain_gradients(*this, in[0], in[1], in[2], in[3], {*this, in}, false);
  }
  Tensors vjp(const VjpArgs& v) const override { return vjp_by_decomposition(*this, v); }
};

// Operands q, k, v and the further ones; results out and lse [B, H, T], the log of each row's sum
// of exponentials, of dropped weights too. That is +inf for a query that attends to no key, so that
// exp(score - lse) is its weights, zeros.
class Flash final : public PrimitiveOf<Flash, AttentionAttributes> {
 public:
  static inline const OpInfo kOp{"attention", {OpKind::kProduct, Precision::kLow, 3}};
  using PrimitiveOf::PrimitiveOf;
  static void check_attributes(const AttentionAttributes& a) { check_dropout(a); }
  int64_t operand_count() const override { return 3 + further(); }
  bool draws() const override { return drops(); }
  Metas infer(MetaSpan in) const override {
    const Shape &q = in[0]->shape, &v = in[2]->shape;
    if (has_mask) check_mask(*in[3], {q[0], q[1], q[2], v[2]});
    check_draw(*this, in, q[0]);
    return {
        Meta::contiguous({q[0], q[1], q[2], v[3]}, in[0]->dtype, in[0]->device),
        Meta::contiguous({q[0], q[1], q[2]}, in[0]->dtype == kF64 ? kF64 : kF32, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    Loops l(in[0]->shape, in[2]->shape);
    l.map.in = {l.operand(l.t, l.d), l.operand(l.s, l.d), l.operand(l.s, l.e)};
    l.further(*this, in);
    l.map.out = {l.operand(l.t, l.e), l.row()};
    return l.map;
  }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const override {
    return drops() ? PrimRef(new Flash(local_attributes(*this, map, 0, loops))) : nullptr;
  }
  SaveMask saved() const override { return {(8u << further()) - 1, 3}; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    const AttentionFurther more(*this, in);
    Tensor scores = scores_of(*this, in[0], in[1], more.mask);
    Tensor wide = cast(scores, in[0].dtype() == kF64 ? kF64 : kF32), lse = logsumexp(wide, {-1});
    if (has_mask)
      lse = where(eq(lse, number_beside(lse, -INFINITY, lse.dtype())),
                  number_beside(lse, INFINITY, lse.dtype()), lse);
    const Tensor weights = dropped(*this, weights_of(scores, has_mask), more);
    return {contract("bhts,bhse->bhte", weights, in[2]), lse};
  }
  Tensors vjp(const VjpArgs& v) const override {
    TESSERA_CHECK(!v.cot[1 % v.cot.size()].defined() || v.cot.size() == 1,
                  "attention: not differentiable through the log-sum-exp");
    if (has_mask && v.in[3].dtype() != kBool && v.wants(3))
      return with_none(
          plain_gradients(*this, v.cot[0], v.in[0], v.in[1], v.in[2], {*this, v.in}, true),
          v.in.size());
    Tensors in{v.cot[0], v.in[0], v.in[1], v.in[2], v.out[0], v.out[1]};
    for (size_t i = 3; i < v.in.size(); ++i) in.push_back(v.in[i]);
    Tensors all = dispatch(PrimRef(new FlashGrad(attributes_of<AttentionAttributes>(*this))), in);
    return with_none(std::move(all), v.in.size());
  }

 private:
  // Operands behind those that have one have no gradient.
  static Tensors with_none(Tensors gradients, size_t operands) {
    gradients.resize(operands);
    return gradients;
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
  TESSERA_CHECK(o.dropout >= 0 && o.dropout <= 1,
                "scaled_dot_product_attention: dropout {}; expected 0 <= p <= 1", o.dropout);
  if (o.dropout == 1) {  // nothing is kept, whatever the key
    AttentionOptions whole = o;
    whole.dropout = 0;
    return scaled_dot_product_attention(q, k, v, whole) * 0.0;
  }
  std::array<Tensor, 3> in = of_one_dtype(q, k, v);
  double scale = o.scale != 0 ? o.scale : 1 / std::sqrt(double(q.size(3)));
  if (o.mask.defined()) check_mask(o.mask.meta(), {q.size(0), q.size(1), q.size(2), k.size(2)});
  const bool flash_fits = q.numel() > 0 && k.numel() > 0;
  TESSERA_CHECK(o.kernel != AttentionKernel::kFlash || flash_fits,
                "scaled_dot_product_attention: the flash kernel takes no empty operands; choose "
                "kAuto or kPlain");
  if (o.kernel == AttentionKernel::kPlain || !flash_fits)
    return plain_attention(q, in[1], in[2], o, scale);  // scales q in its own dtype
  AttentionAttributes a{scale, o.causal, o.mask.defined()};
  Tensors all{in[0], in[1], in[2]};
  if (a.has_mask) all.push_back(of_four_dims(o.mask));
  if (o.dropout > 0) {
    const DropoutDraw draw = dropout_draw(q);
    a.drop = {o.dropout, draw.samples.defined()};
    all.push_back(draw.key);
    if (a.drop.by_sample) all.push_back(draw.samples);
  }
  // Masks, keys and sample numbers are the same on every rank.
  Scoped<bool> same(context().replicate_plain, context().replicate_plain || a.further() > 0);
  return dispatch(PrimRef(new Flash(a)), all)[0];
}

void register_attention_ops(OpRegistry& registry) {
  auto q = [] { return sample_values({2, 2, 5, 3}, -1, 1, 1); };
  auto k = [] { return sample_values({2, 2, 5, 3}, -1, 1, 2); };
  auto v = [] { return sample_values({2, 2, 5, 4}, -1, 1, 3); };
  // Nothing, causal, keys of which some are padding, and all of one sequence, and numbers for each
  // query and head.
  struct Variant {
    AttentionAttributes attributes;
    std::vector<Tensor> further = {};
  };
  auto variants = [] {
    const Tensor padding = lt(arange(0, 5), from_values<int64_t>({4, 0}, {2, 1, 1, 1})),
                 numbers = sample_values({1, 2, 5, 5}, -1, 1, 6),
                 key = from_values<int64_t>({7, 3}, {2});
    const auto samples = [](int64_t n) { return sample_integers({n}, 0, 100, 2); };
    return std::vector<Variant>{{{0.5, false}},
                                {{0.5, true}},
                                {{0.5, false, true}, {padding}},
                                {{0.5, true, true}, {numbers}},
                                {{0.5, true, false, {0.4, false}}, {key}},
                                {{0.5, false, true, {0.4, true}}, {padding, key, samples(2)}},
                                {{0.5, false, true, {0.4, true}}, {numbers, key, samples(1)}}};
  };
  auto with = [](std::vector<Tensor> in, const std::vector<Tensor>& further) {
    in.insert(in.end(), further.begin(), further.end());
    return in;
  };
  registry.add("attention", [=] {
    std::vector<Sample> s;
    for (auto& [a, further] : variants())
      s.push_back({PrimRef(new Flash(a)), with({q(), k(), v()}, further)});
    return s;
  });
  registry.add("attention_grad", [=] {
    std::vector<Sample> s;
    for (auto& [a, further] : variants()) {
      std::vector<Tensor> in = with({q(), k(), v()}, further);
      Tensors out = dispatch(PrimRef(new Flash(a)), in);
      // out and lse are functions of q, k, v: perturbing one alone means nothing, so finite
      // differences do not apply.
      s.push_back(
          {PrimRef(new FlashGrad(a)),
           with({sample_values({2, 2, 5, 4}, -1, 1, 4), q(), k(), v(), out[0], out[1]}, further),
           false});
    }
    return s;
  });
}

}  // namespace tessera
