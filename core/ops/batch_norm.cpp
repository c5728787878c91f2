// Batch-norm with its fused derivative; group-norm and instance-norm are layer-norms of rows.
#include "core/ops/batch_norm.h"

#include "core/dispatch/dispatch.h"
#include "core/dispatch/precision.h"
#include "core/ops/batch_norm_common.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/register.h"
#include "core/ops/samples.h"
#include "core/ops/update.h"

namespace tessera {
namespace {

using namespace batch_norm_family;

class BatchNormGrad final : public PrimitiveOf<BatchNormGrad, BatchNormFamily> {
 public:
  int64_t operand_count() const override { return 4 + form.weight + form.relu; }
  static inline const OpInfo kOp{"batch_norm_grad", {OpKind::kOther, Precision::kAsGiven, 4}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    const Meta& x = *in[1];
    check_x(x), check_like_x(x, *in[0], "the gradient");
    if (form.relu) check_like_x(x, *in.back(), "y");
    for (size_t i = 2; i < channel_end(); ++i) check_channel(x, *in[i], "an operand");
    Metas out;
    for (int i = 0; i <= int(form.residual); ++i)
      out.push_back(Meta::contiguous(x.shape, x.dtype, x.device));
    DType t = form.weight ? in[4]->dtype : stat_type(x.dtype);
    for (int i = 0; i < int(form.weight) + int(form.bias); ++i)
      out.push_back(Meta::contiguous({x.shape[1]}, t, x.device));
    return out;
  }
  AxisMap axes(MetaSpan in) const override {
    NormLoops l(in[1]->shape);
    l.map.in = {l.x, l.x, l.channel, l.channel};
    if (form.weight) l.map.in.push_back(l.channel);
    if (form.relu) l.map.in.push_back(l.x);
    l.map.out = {l.x};
    if (form.residual) l.map.out.push_back(l.x);
    for (int i = 0; i < int(form.weight) + int(form.bias); ++i) l.map.out.push_back(l.channel);
    l.map.linear_in = 1;
    return l.map;
  }
  SaveMask saved() const override { return {63, 0}; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    const DType wide = stat_type(in[1].dtype());
    const Tensor x = cast(in[1], wide);
    Tensor g = cast(in[0], wide);
    if (form.relu) g = where(gt(in.back(), 0), g, zeros_like(g));
    const Dims dims = all_but_channels(x);
    const double n = double(x.numel()) / double(std::max<int64_t>(x.size(1), 1));
    // From x itself, so that differentiating this sees how mean and var depend on it.
    Tensor centred = x - sum(x, dims, true) / n;
    Tensor scale = rsqrt(sum(square(centred), dims, true) / n + eps), h = centred * scale,
           q = form.weight ? g * beside(cast(in[4], wide), x) : g;
    Tensor dx = (q - sum(q, dims, true) / n - h * (sum(q * h, dims, true) / n)) * scale;
    Tensors out{cast(dx, in[1].dtype())};
    if (form.residual) out.push_back(cast(g, in[1].dtype()));
    const DType t = form.weight ? in[4].dtype() : wide;
    if (form.weight) out.push_back(cast(sum(g * h, dims), t));
    if (form.bias) out.push_back(cast(sum(g, dims), t));
    return out;
  }
  Tensors vjp(const VjpArgs& v) const override { return vjp_by_decomposition(*this, v); }

 private:
  size_t channel_end() const { return form.weight ? 5 : 4; }
};

class BatchNorm final : public PrimitiveOf<BatchNorm, BatchNormFamily> {
 public:
  int64_t operand_count() const override { return 1 + form.weight + form.bias + form.residual; }
  static inline const OpInfo kOp{"batch_norm", {OpKind::kOther, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    const Meta& x = *in[0];
    check_x(x);
    if (form.residual) check_like_x(x, *in.back(), "residual");
    for (size_t i = 1; i < in.size() - form.residual; ++i) {
      check_channel(x, *in[i], form.weight && i == 1 ? "weight" : "bias");
      TESSERA_CHECK(in[i]->dtype == (form.weight ? in[1]->dtype : stat_type(x.dtype)),
                    "batch_norm: weight and bias are {}; convert them to one dtype", describe(in));
    }
    Meta channel = Meta::contiguous({x.shape[1]}, stat_type(x.dtype), x.device);
    return {Meta::contiguous(x.shape, x.dtype, x.device), channel, channel};
  }
  AxisMap axes(MetaSpan in) const override {
    NormLoops l(in[0]->shape);
    l.map.in = {l.x};
    for (size_t i = 1; i < in.size() - form.residual; ++i) l.map.in.push_back(l.channel);
    if (form.residual) l.map.in.push_back(l.x);
    l.map.out = {l.x, l.channel, l.channel};
    return l.map;
  }
  SaveMask saved() const override { return {form.weight ? 3u : 1u, form.relu ? 7u : 6u}; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    const DType wide = stat_type(in[0].dtype());
    const Tensor x = cast(in[0], wide);
    const Dims dims = all_but_channels(x);
    Tensor mu = mean(x, dims, true), centred = x - mu, variance = mean(square(centred), dims, true),
           y = centred * rsqrt(variance + eps);
    if (form.weight) y = y * beside(cast(in[1], wide), x);
    if (form.bias) y = y + beside(cast(in[form.weight ? 2 : 1], wide), x);
    if (form.residual) y = y + cast(in.back(), wide);
    if (form.relu) y = relu(y);
    return {cast(y, in[0].dtype()), reshape(mu, {-1}), reshape(variance, {-1})};
  }
  Tensors vjp(const VjpArgs& v) const override {
    TESSERA_CHECK(!(v.cot[1].defined() || v.cot[2].defined()),
                  "batch_norm: not differentiable through mean and var");
    if (!v.cot[0].defined()) return Tensors(v.in.size());
    const int residual = int(v.in.size()) - 1;
    BatchNormForm wanted = form;
    wanted.bias = form.bias && v.wants(form.weight ? 2 : 1);
    // Without a relu, the residual's gradient is the cotangent itself.
    wanted.residual = form.residual && form.relu && v.wants(residual);
    Tensors in{v.cot[0], v.in[0], v.out[1], v.out[2]};
    if (form.weight) in.push_back(v.in[1]);
    if (form.relu) in.push_back(std::move(v.out[0]));
    Tensors all = dispatch(PrimRef(new BatchNormGrad({eps, wanted})), in), g{all[0]};
    size_t next = wanted.residual ? 2 : 1;
    if (form.weight) g.push_back(all[next++]);
    if (form.bias) g.push_back(wanted.bias ? all[next] : Tensor());
    if (form.residual) g.push_back(wanted.residual ? all[1] : form.relu ? Tensor() : v.cot[0]);
    return g;
  }
};

// Weight and bias, cast to the dtype of statistics.
Tensor wide_channel(const Tensor& t, const Tensor& x) {
  return t.defined() && is_floating(t.dtype()) ? cast(t, stat_type(x.dtype())) : t;
}

void check_running(const Tensor& x, const Tensor& t, const char* what) {
  TESSERA_CHECK_AS(ShapeError, t.shape() == Shape{x.size(1)},
                   "batch_norm: {} is {}; expected [{}] beside x {}", what, describe(t), x.size(1),
                   to_string(x.shape()));
}

}  // namespace

BatchMoments batch_norm_moments(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                double eps, const NormThen& then) {
  const bool residual = then.residual.defined();
  // A residual of another dtype promotes, and one of another shape broadcasts or throws.
  if (residual && !(then.residual.dtype() == x.dtype() && then.residual.shape() == x.shape())) {
    BatchMoments now = batch_norm_moments(x, weight, bias, eps);
    now.y = then(std::move(now.y));
    return now;
  }
  Tensors in{x};
  if (weight.defined()) in.push_back(wide_channel(weight, x));
  if (bias.defined()) in.push_back(wide_channel(bias, x));
  if (residual) in.push_back(then.residual);
  const BatchNormForm form{weight.defined(), bias.defined(), residual, then.relu};
  Tensors out = dispatch(PrimRef(new BatchNorm({eps, form})), in);
  return {out[0], out[1].detach(), out[2].detach()};
}

Tensor NormThen::operator()(Tensor y) const {
  if (residual.defined()) y = std::move(y) + residual;
  return relu ? tessera::relu(std::move(y)) : y;
}

void batch_norm_family::follow_(const Tensor& running, const Tensor& value, const Tensor& factor) {
  Tensor old = running.detach(), v = cast(value, old.dtype());
  assign_(old, old + cast(factor, old.dtype()) * (v - old));
}

void follow_moments_(const Tensor& running_mean, const Tensor& running_var, const BatchMoments& now,
                     int64_t count, const Tensor& factor) {
  follow_(running_mean, now.mean, factor);
  follow_(running_var, now.var * (double(count) / double(std::max<int64_t>(count - 1, 1))), factor);
}

Tensor batch_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var,
                  const BatchNormOptions& o, const NormThen& then) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() >= 2 && is_floating(x.dtype()),
                   "batch_norm: x is {}; expected floats [N, C, ..]", describe(x));
  TESSERA_CHECK(running_mean.defined() == running_var.defined(),
                "batch_norm: one of running_mean and running_var is undefined; give both or none");
  if (running_mean.defined()) {
    check_running(x, running_mean, "running_mean");
    check_running(x, running_var, "running_var");
  }
  if (o.training) {
    const int64_t count = x.size(1) ? x.numel() / x.size(1) : 0;
    TESSERA_CHECK_AS(ShapeError, count > 1,
                     "batch_norm: {} values a channel in x {}; training takes more than one", count,
                     to_string(x.shape()));
    BatchMoments now = batch_norm_moments(x, o.weight, o.bias, o.eps, then);
    if (running_mean.defined())
      follow_moments_(running_mean, running_var, now, count,
                      scalar_tensor(o.momentum, running_mean.dtype(), x.device()));
    return now.y;
  }
  TESSERA_CHECK(running_mean.defined(),
                "batch_norm: without training it takes running_mean and running_var");
  Tensor scale = rsqrt(wide_channel(running_var, x) + o.eps);
  if (o.weight.defined()) {
    check_running(x, o.weight, "weight");
    scale = scale * wide_channel(o.weight, x);
  }
  Tensor shift = -wide_channel(running_mean, x) * scale;
  if (o.bias.defined()) {
    check_running(x, o.bias, "bias");
    shift = shift + wide_channel(o.bias, x);
  }
  const DType stat = stat_type(x.dtype());
  Tensor y = mul_add(cast(x, stat), beside(scale, x), beside(shift, x));
  if (then.residual.defined() && then.residual.dtype() != x.dtype())
    return then(cast(std::move(y), x.dtype()));
  // Rounded once, as in training.
  const NormThen wide{then.residual.defined() ? cast(then.residual, stat) : then.residual,
                      then.relu};
  return cast(wide(std::move(y)), x.dtype());
}

Tensor group_norm(const Tensor& given, int64_t groups, const Tensor& weight, const Tensor& bias,
                  double eps) {
  const Tensor x = autocast_operand(Precision::kWide, given);
  TESSERA_CHECK_AS(ShapeError, x.ndim() >= 2 && is_floating(x.dtype()),
                   "group_norm: x is {}; expected floats [N, C, ..]", describe(x));
  TESSERA_CHECK_AS(ShapeError, groups > 0 && x.size(1) % groups == 0,
                   "group_norm: the {} channels of x {} do not divide into groups={}", x.size(1),
                   to_string(x.shape()), groups);
  for (const Tensor* t : {&weight, &bias})
    TESSERA_CHECK_AS(ShapeError, !t->defined() || t->shape() == Shape{x.size(1)},
                     "group_norm: weight or bias is {}; expected [{}] beside x {}", describe(*t),
                     x.size(1), to_string(x.shape()));
  int64_t each = x.size(1) / groups;
  for (int i = 2; i < x.ndim(); ++i) each *= x.size(i);
  Tensor y = reshape(cast(x, stat_type(x.dtype())), {x.size(0), groups, each});
  y = reshape(layer_norm(y, {}, {}, eps), x.shape());
  if (weight.defined()) y = y * beside(wide_channel(weight, x), x);
  if (bias.defined()) y = y + beside(wide_channel(bias, x), x);
  return cast(y, x.dtype());
}

Tensor instance_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() >= 3, "instance_norm: x is {}; expected floats [N, C, ..]",
                   describe(x));
  return group_norm(x, x.size(1), weight, bias, eps);
}

void register_batch_norm_ops(OpRegistry& registry) {
  registry.add("batch_norm", [] {
    Tensor x = sample_values({2, 3, 4, 2}, -2, 2, 1), w = sample_values({3}, 0.5, 2, 2),
           b = sample_values({3}, -1, 1, 3), z = sample_values({2, 3, 4, 2}, -2, 2, 5);
    auto sample = [](double eps, const BatchNormForm& form, std::vector<Tensor> in) {
      return Sample{PrimRef(new BatchNorm({eps, form})), std::move(in)};
    };
    return std::vector<Sample>{
        sample(1e-5, {.weight = true, .bias = true}, {x, w, b}),
        sample(1e-5, {.weight = true}, {x, w}),
        sample(1e-3, {}, {sample_values({5, 3}, -2, 2, 1)}),
        sample(1e-5, {.weight = true, .bias = true},
               {sample_values({3, 1, 4}, -2, 2, 1), sample_values({1}, 0.5, 2, 2),
                sample_values({1}, -1, 1, 3)}),
        sample(1e-5, {.weight = true, .bias = true, .relu = true}, {x, w, b}),
        sample(1e-5, {.weight = true, .bias = true, .residual = true, .relu = true}, {x, w, b, z}),
        sample(1e-5, {.weight = true, .residual = true}, {x, w, z})};
  });
  registry.add("batch_norm_grad", [] {
    std::vector<Sample> all;
    for (const Shape& s : {Shape{2, 3, 4, 2}, Shape{5, 3}}) {
      Tensor x = sample_values(s, -2, 2, 1), g = sample_values(s, -1, 1, 3),
             w = sample_values({3}, 0.5, 2, 2), y = sample_values(s, -1, 1, 7);
      Tensors out = dispatch(PrimRef(new BatchNorm({1e-5, {}})), operands(Tensor(x)));
      // mean and var are functions of x: moving them alone means nothing, so finite differences do
      // not apply.
      auto add = [&](const BatchNormForm& form, std::vector<Tensor> in) {
        all.push_back({PrimRef(new BatchNormGrad({1e-5, form})), std::move(in), false});
      };
      add({.weight = true, .bias = true}, {g, x, out[1], out[2], w});
      add({}, {g, x, out[1], out[2]});
      add({.weight = true, .bias = true, .residual = true, .relu = true},
          {g, x, out[1], out[2], w, y});
      add({.relu = true}, {g, x, out[1], out[2], y});
    }
    return all;
  });
}

}  // namespace tessera
