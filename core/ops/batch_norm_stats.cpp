// The four parts of batch-norm as primitives. Invariant: stats then apply, and grad_stats then
// grad_apply, have the bits of batch_norm and of its derivative, since they share the loops.
#include "core/ops/batch_norm_stats.h"

#include "core/dispatch/dispatch.h"
#include "core/ops/batch_norm_common.h"
#include "core/ops/compose.h"
#include "core/ops/pointwise.h"
#include "core/ops/register.h"
#include "core/ops/samples.h"

namespace tessera {
namespace {

using namespace batch_norm_family;

// The base of the four parts: their derivatives come from their decompositions.
template <class Self>
class Part : public PrimitiveOf<Self, BatchNormFamily> {
 public:
  using PrimitiveOf<Self, BatchNormFamily>::PrimitiveOf;
  SaveMask saved() const override { return {255, 0}; }
  bool decomposable() const override { return true; }
  Tensors vjp(const VjpArgs& v) const override { return vjp_by_decomposition(*this, v); }

 protected:
  static Meta channel(const Meta& x) {
    return Meta::contiguous({x.shape[1]}, stat_type(x.dtype), x.device);
  }
  // g in the dtype of the arithmetic, and zeros where y is not positive.
  Tensor counted(const Tensor& g, std::span<const Tensor> in) const {
    const Tensor wide = cast(g, stat_type(g.dtype()));
    return this->form.relu ? where(gt(in.back(), 0), wide, zeros_like(wide)) : wide;
  }
  // An operand [C] beside the wide x.
  static Tensor wide(const Tensor& t, const Tensor& x) { return beside(cast(t, x.dtype()), x); }
};

class Stats final : public Part<Stats> {
 public:
  static inline const OpInfo kOp{"batch_norm_stats", {OpKind::kOther, Precision::kAsGiven, 1}};
  using Part::Part;
  Metas infer(MetaSpan in) const override {
    check_x(*in[0]);
    return {channel(*in[0]), channel(*in[0])};
  }
  AxisMap axes(MetaSpan in) const override {
    NormLoops l(in[0]->shape);
    l.map.in = {l.x}, l.map.out = {l.channel, l.channel};
    return l.map;
  }
  Tensors decompose(std::span<const Tensor> in) const override {
    const Tensor x = cast(in[0], stat_type(in[0].dtype()));
    const Dims dims = all_but_channels(x);
    const double n = double(std::max<int64_t>(x.numel() / std::max<int64_t>(x.size(1), 1), 1));
    const Tensor mu = sum(x, dims, true) / n, var = sum(square(x - mu), dims) / n;
    return {reshape(mu, {-1}), var};
  }
};

// Operands: x, mean, var, then weight, bias, residual where present.
class Apply final : public Part<Apply> {
 public:
  int64_t operand_count() const override { return 3 + form.weight + form.bias + form.residual; }
  static inline const OpInfo kOp{"batch_norm_apply", {OpKind::kOther, Precision::kAsGiven, 3}};
  using Part::Part;
  Metas infer(MetaSpan in) const override {
    const Meta& x = *in[0];
    check_x(x);
    if (form.residual) check_like_x(x, *in.back(), "residual");
    for (size_t i = 1; i < in.size() - form.residual; ++i) check_channel(x, *in[i], "an operand");
    return {Meta::contiguous(x.shape, x.dtype, x.device)};
  }
  AxisMap axes(MetaSpan in) const override {
    NormLoops l(in[0]->shape, Factor::kPass);
    l.map.in = {l.x};
    for (size_t i = 1; i < in.size() - form.residual; ++i) l.map.in.push_back(l.channel);
    if (form.residual) l.map.in.push_back(l.x);
    l.map.out = {l.x};
    return l.map;
  }
  Tensors decompose(std::span<const Tensor> in) const override {
    const Tensor x = cast(in[0], stat_type(in[0].dtype()));
    Tensor y = (x - wide(in[1], x)) * rsqrt(wide(in[2], x) + eps);
    if (form.weight) y = y * wide(in[3], x);
    if (form.bias) y = y + wide(in[form.weight ? 4 : 3], x);
    if (form.residual) y = y + cast(in.back(), x.dtype());
    if (form.relu) y = relu(y);
    return {cast(y, in[0].dtype())};
  }
};

// Operands: g, x, mean, then y behind a relu.
class GradStats final : public Part<GradStats> {
 public:
  int64_t operand_count() const override { return 3 + form.relu; }
  static inline const OpInfo kOp{"batch_norm_grad_stats", {OpKind::kOther, Precision::kAsGiven, 3}};
  using Part::Part;
  Metas infer(MetaSpan in) const override {
    const Meta& x = *in[1];
    check_x(x), check_like_x(x, *in[0], "the gradient"), check_channel(x, *in[2], "mean");
    if (form.relu) check_like_x(x, *in.back(), "y");
    return {channel(x), channel(x)};
  }
  AxisMap axes(MetaSpan in) const override {
    NormLoops l(in[1]->shape, Factor::kSum);
    l.map.in = {l.x, l.x, l.channel};
    if (form.relu) l.map.in.push_back(l.x);
    l.map.out = {l.channel, l.channel};
    l.map.linear_in = 1;
    return l.map;
  }
  Tensors decompose(std::span<const Tensor> in) const override {
    const Tensor g = counted(in[0], in), x = cast(in[1], g.dtype());
    const Dims dims = all_but_channels(x);
    return {sum(g, dims), sum(g * (x - wide(in[2], x)), dims)};
  }
};

// Operands: g, x, mean, var, mean of g, mean of g (x - mean), then weight, then y behind a relu.
// Results: dx, then the residual's where wanted.
class GradApply final : public Part<GradApply> {
 public:
  int64_t operand_count() const override { return 6 + form.weight + form.relu; }
  static inline const OpInfo kOp{"batch_norm_grad_apply", {OpKind::kOther, Precision::kAsGiven, 6}};
  using Part::Part;
  Metas infer(MetaSpan in) const override {
    const Meta& x = *in[1];
    check_x(x), check_like_x(x, *in[0], "the gradient");
    if (form.relu) check_like_x(x, *in.back(), "y");
    for (size_t i = 2; i < in.size() - form.relu; ++i) check_channel(x, *in[i], "an operand");
    Metas out;
    for (int i = 0; i <= int(form.residual); ++i)
      out.push_back(Meta::contiguous(x.shape, x.dtype, x.device));
    return out;
  }
  AxisMap axes(MetaSpan in) const override {
    NormLoops l(in[1]->shape, Factor::kPass);
    l.map.in = {l.x, l.x};
    for (size_t i = 2; i < in.size() - form.relu; ++i) l.map.in.push_back(l.channel);
    if (form.relu) l.map.in.push_back(l.x);
    l.map.out = {l.x};
    if (form.residual) l.map.out.push_back(l.x);
    return l.map;
  }
  Tensors decompose(std::span<const Tensor> in) const override {
    const Tensor g = counted(in[0], in), x = cast(in[1], g.dtype());
    const Tensor rstd = rsqrt(wide(in[3], x) + eps), slope = wide(in[5], x) * square(rstd);
    Tensor dx = (g - wide(in[4], x) - (x - wide(in[2], x)) * slope) * rstd;
    if (form.weight) dx = dx * wide(in[6], x);
    Tensors out{cast(dx, in[1].dtype())};
    if (form.residual) out.push_back(cast(g, in[1].dtype()));
    return out;
  }
};

}  // namespace

PrimRef batch_norm_apply_op(const BatchNormAttributes& attributes) {
  return PrimRef(new Apply(attributes));
}
PrimRef batch_norm_grad_stats_op(bool relu) { return PrimRef(new GradStats({0, {.relu = relu}})); }
PrimRef batch_norm_grad_apply_op(const BatchNormAttributes& attributes) {
  return PrimRef(new GradApply(attributes));
}

ChannelMoments batch_norm_stats(const Tensor& x) {
  Tensors out = dispatch(PrimRef(new Stats({0, {}})), operands(Tensor(x)));
  return {out[0], out[1]};
}

Tensor batch_norm_apply(const Tensor& x, const ChannelMoments& of, const Tensor& weight,
                        const Tensor& bias, double eps, const NormThen& then) {
  const bool residual = then.residual.defined();
  if (residual && !(then.residual.dtype() == x.dtype() && then.residual.shape() == x.shape()))
    return then(batch_norm_apply(x, of, weight, bias, eps));
  Tensors in{x, of.mean, of.var};
  for (const Tensor* t : {&weight, &bias})
    if (t->defined()) in.push_back(cast(*t, stat_type(x.dtype())));
  if (residual) in.push_back(then.residual);
  const BatchNormForm form{weight.defined(), bias.defined(), residual, then.relu};
  return dispatch(batch_norm_apply_op({eps, form}), in)[0];
}

ChannelSums batch_norm_grad_stats(const Tensor& g, const Tensor& x, const Tensor& mean,
                                  const Tensor& y) {
  Tensors in{g, x, mean};
  if (y.defined()) in.push_back(y);
  Tensors out = dispatch(batch_norm_grad_stats_op(y.defined()), in);
  return {out[0], out[1]};
}

BatchNormGrads batch_norm_grad_apply(const Tensor& g, const Tensor& x, const ChannelMoments& of,
                                     const ChannelSums& mean, const Tensor& weight, double eps,
                                     const Tensor& y, bool residual) {
  Tensors in{g, x, of.mean, of.var, mean.g, mean.gx};
  if (weight.defined()) in.push_back(cast(weight, stat_type(x.dtype())));
  if (y.defined()) in.push_back(y);
  const BatchNormForm form{.weight = weight.defined(), .residual = residual, .relu = y.defined()};
  Tensors out = dispatch(batch_norm_grad_apply_op({eps, form}), in);
  return {out[0], residual ? out[1] : Tensor()};
}

void follow_moments_(const Tensor& running_mean, const Tensor& running_var, const BatchMoments& now,
                     const Tensor& count, const Tensor& factor) {
  const Tensor unbiased = count / clamp_min(count - 1, 1);
  follow_(running_mean, now.mean, factor);
  follow_(running_var, now.var * cast(unbiased, now.var.dtype()), factor);
}

void register_batch_norm_part_ops(OpRegistry& registry) {
  const Shape kShape{2, 3, 4, 2}, kRows{5, 3};
  auto x = [](const Shape& s) { return sample_values(s, -2, 2, 1); };
  auto like_x = [](const Shape& s, uint64_t key) { return sample_values(s, -1, 1, key); };
  auto channel = [](uint64_t key) { return sample_values({3}, 0.5, 2, key); };
  registry.add("batch_norm_stats", [=] {
    return std::vector<Sample>{{PrimRef(new Stats({0, {}})), {x(kShape)}},
                               {PrimRef(new Stats({0, {}})), {x(kRows)}}};
  });
  registry.add("batch_norm_apply", [=] {
    auto sample = [&](const BatchNormForm& form, const Shape& s) {
      std::vector<Tensor> in{x(s), channel(2), channel(3)};
      if (form.weight) in.push_back(channel(4));
      if (form.bias) in.push_back(channel(5));
      if (form.residual) in.push_back(like_x(s, 6));
      return Sample{PrimRef(new Apply({1e-5, form})), in};
    };
    return std::vector<Sample>{
        sample({}, kRows), sample({.weight = true, .bias = true}, kShape),
        sample({.bias = true, .relu = true}, kShape),
        sample({.weight = true, .bias = true, .residual = true, .relu = true}, kShape)};
  });
  registry.add("batch_norm_grad_stats", [=] {
    return std::vector<Sample>{
        {PrimRef(new GradStats({0, {}})), {like_x(kRows, 2), x(kRows), channel(3)}},
        {PrimRef(new GradStats({0, {.relu = true}})),
         {like_x(kShape, 2), x(kShape), channel(3), like_x(kShape, 7)}}};
  });
  registry.add("batch_norm_grad_apply", [=] {
    auto sample = [&](const BatchNormForm& form, const Shape& s) {
      std::vector<Tensor> in{like_x(s, 2), x(s), channel(3), channel(4), channel(5), channel(6)};
      if (form.weight) in.push_back(channel(7));
      if (form.relu) in.push_back(like_x(s, 8));
      return Sample{PrimRef(new GradApply({1e-5, form})), in};
    };
    return std::vector<Sample>{sample({}, kRows), sample({.weight = true}, kShape),
                               sample({.weight = true, .residual = true, .relu = true}, kShape)};
  });
}

}  // namespace tessera
