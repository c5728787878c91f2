#include "core/nn/conv_layers.h"

#include <cmath>

#include "core/dispatch/context.h"
#include "core/nn/layers.h"
#include "core/ops/batch_norm_stats.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"

namespace tessera::nn {
namespace {

// A weight [outer, inner, kernel..] and a bias, as both kinds of convolution have them.
void draw_convolution(const Tensor& weight, const Tensor& bias, const InitKeys& keys) {
  kaiming_uniform_(weight, std::sqrt(5.0), keys.key("weight"));
  double bound = 1 / std::sqrt(double(fans_of(weight.shape()).in));
  if (bias.defined()) uniform_(bias, -bound, bound, keys.key("bias"));
}

Shape weight_shape(const char* name, int dims, int64_t in, int64_t out, int64_t groups,
                   const PerDim& kernel, bool transposed) {
  TESSERA_CHECK(in > 0 && out > 0 && groups > 0, "{}: in={}, out={} and groups={} must be positive",
                name, in, out, groups);
  TESSERA_CHECK(in % groups == 0 && out % groups == 0,
                "{}: in={} and out={} do not divide into groups={}", name, in, out, groups);
  Shape s = transposed ? Shape{in, out / groups} : Shape{out, in / groups};
  for (int64_t k : kernel.expand(dims, 1, name, "kernel")) s.push_back(k);
  return s;
}

std::string kernel_of(const Tensor& weight) {
  return tessera::to_string(std::span<const int64_t>(weight.shape()).subspan(2));
}

}  // namespace

// ---- Conv1d, Conv2d, Conv3d

ConvNd::ConvNd(int dims, ConvOptions o) : options(o), dims_(dims) {
  static constexpr const char* kNames[] = {"conv1d", "conv2d", "conv3d"};
  const char* name = kNames[dims - 1];
  for (int64_t step : o.stride.expand(dims, 1, name, "stride"))
    TESSERA_CHECK(!o.padding.same() || step == 1,
                  "{}: padding \"same\" with stride {}; the result has no size of its own, give "
                  "numbers",
                  name, step);
  register_parameter(
      "weight", weight,
      empty_parameter(weight_shape(name, dims, o.in, o.out, o.groups, o.kernel, false)));
  register_parameter("bias", bias, o.bias ? empty_parameter({o.out}) : Tensor());
  draw();
}

void ConvNd::reset(const InitKeys& keys) { draw_convolution(weight, bias, keys); }

Tensor ConvNd::forward(Tensor x) {
  ConvGeometry o{options.stride, options.padding, options.dilation, options.groups};
  if (options.padding_mode != PadMode::kConstant) {
    Dims pads, before = o.padding.both().expand(dims_, 0, "conv", "padding");
    for (int i = dims_ - 1; i >= 0; --i) {
      int64_t both =
          o.dilation.expand(dims_, 1, "conv", "dilation")[i] * (weight.shape()[i + 2] - 1);
      pads.push_back(o.padding.same() ? both / 2 : before[i]);
      pads.push_back(o.padding.same() ? both - both / 2 : before[i]);
    }
    x = pad(x, pads, options.padding_mode);
    o.padding = 0;
  }
  return dims_ == 1   ? tessera::conv1d(x, weight, bias, o)
         : dims_ == 2 ? tessera::conv2d(x, weight, bias, o)
                      : tessera::conv3d(x, weight, bias, o);
}

std::string ConvNd::describe() const {
  std::string text =
      fmt::format("in={}, out={}, kernel={}, stride={}", options.in, options.out, kernel_of(weight),
                  tessera::to_string(options.stride.expand(dims_, 1, "conv", "stride")));
  if (options.groups != 1) text += fmt::format(", groups={}", options.groups);
  return text + fmt::format(", bias={}", options.bias);
}

// ---- ConvTranspose1d, ConvTranspose2d, ConvTranspose3d

ConvTransposeNd::ConvTransposeNd(int dims, ConvTransposeOptions o) : options(o), dims_(dims) {
  static constexpr const char* kNames[] = {"conv_transpose1d", "conv_transpose2d",
                                           "conv_transpose3d"};
  const char* name = kNames[dims - 1];
  register_parameter(
      "weight", weight,
      empty_parameter(weight_shape(name, dims, o.in, o.out, o.groups, o.kernel, true)));
  register_parameter("bias", bias, o.bias ? empty_parameter({o.out}) : Tensor());
  draw();
}

void ConvTransposeNd::reset(const InitKeys& keys) { draw_convolution(weight, bias, keys); }

Tensor ConvTransposeNd::forward(Tensor x) {
  const tessera::ConvTransposeOptions o{options.stride, options.padding, options.output_padding,
                                        options.groups, options.dilation};
  return dims_ == 1   ? tessera::conv_transpose1d(x, weight, bias, o)
         : dims_ == 2 ? tessera::conv_transpose2d(x, weight, bias, o)
                      : tessera::conv_transpose3d(x, weight, bias, o);
}

std::string ConvTransposeNd::describe() const {
  return fmt::format(
      "in={}, out={}, kernel={}, stride={}, bias={}", options.in, options.out, kernel_of(weight),
      tessera::to_string(options.stride.expand(dims_, 1, "conv_transpose", "stride")),
      options.bias);
}

// ---- BatchNorm1d, BatchNorm2d, BatchNorm3d

BatchNormNd::BatchNormNd(int least_dims, int most_dims, BatchNormOptions o)
    : options(o), least_dims_(least_dims), most_dims_(most_dims) {
  TESSERA_CHECK(o.channels > 0, "batch_norm: channels={} must be positive", o.channels);
  TESSERA_CHECK(!o.momentum || (*o.momentum >= 0 && *o.momentum <= 1),
                "batch_norm: momentum={} is not in [0, 1]", o.momentum.value_or(0));
  const Shape s{o.channels};
  register_parameter("weight", weight, o.affine ? empty_parameter(s) : Tensor());
  register_parameter("bias", bias, o.affine ? empty_parameter(s) : Tensor());
  const bool track = o.track_running_stats;
  auto buffer = [&](const Shape& shape, DType dtype) {
    return track ? empty(shape, dtype, parameter_device()) : Tensor();
  };
  const DType t = context().default_dtype;
  register_buffer("running_mean", running_mean, buffer(s, t));
  register_buffer("running_var", running_var, buffer(s, t));
  register_buffer("num_batches_tracked", num_batches_tracked, buffer({}, kI64));
  draw();
}

void BatchNormNd::reset(const InitKeys&) {
  if (options.affine) ones_(weight), zeros_(bias);
  if (!options.track_running_stats) return;
  zeros_(running_mean), ones_(running_var), zeros_(num_batches_tracked);
}

// The share of this batch in the running statistics. The count is a tensor, so that it moves on in
// a recorded step.
Tensor BatchNormNd::factor() const {
  if (options.momentum) return scalar_tensor(*options.momentum, kF64, running_mean.device());
  return 1.0 / cast(num_batches_tracked, kF64);
}

Tensor BatchNormNd::forward(Tensor x) { return normalized(x, {}); }

Tensor BatchNormNd::operator()(Tensor x, const NormThen& then) {
  Tensor in[] = {std::move(x), then.residual};
  return call({in, then.residual.defined() ? 2u : 1u},
              [&] { return normalized(in[0], {.residual = in[1], .relu = then.relu}); });
}

Tensor BatchNormNd::normalized(const Tensor& x, const NormThen& then) {
  TESSERA_CHECK_AS(
      ShapeError,
      x.ndim() >= least_dims_ && x.ndim() <= most_dims_ && x.size(1) == options.channels,
      "batch_norm: x is {}; expected {} dims and channels={} in dim 1", tessera::describe(x),
      most_dims_, options.channels);
  if (!training() && options.track_running_stats)
    return tessera::batch_norm(x, running_mean, running_var,
                               {.weight = weight, .bias = bias, .eps = options.eps}, then);
  source_changes_.note_use();
  if (training() && source_) {
    SharedMoments all = source_(x, weight, bias, options.eps, then);
    if (options.track_running_stats) {
      add_(num_batches_tracked, scalar_tensor(1, kI64, x.device()));
      follow_moments_(running_mean, running_var, all.now, all.count, factor());
    }
    return all.now.y;
  }
  const int64_t count = x.numel() / options.channels;
  TESSERA_CHECK_AS(ShapeError, count > 1 || !training(),
                   "batch_norm: {} values a channel in x {}; training takes more than one", count,
                   tessera::to_string(x.shape()));
  BatchMoments now = batch_norm_moments(x, weight, bias, options.eps, then);
  if (training() && options.track_running_stats) {
    add_(num_batches_tracked, scalar_tensor(1, kI64, x.device()));
    follow_moments_(running_mean, running_var, now, count, factor());
  }
  return now.y;
}

void BatchNormNd::share_moments(MomentsSource source) {
  source_ = std::move(source);
  source_changes_.note_change();
}

std::string BatchNormNd::type_name() const {
  return source_ ? "SyncBatchNorm" : Module::type_name();
}

std::string BatchNormNd::describe() const {
  return fmt::format("channels={}, eps={}, momentum={}, affine={}, track_running_stats={}",
                     options.channels, options.eps,
                     options.momentum ? fmt::format("{}", *options.momentum) : "none",
                     options.affine, options.track_running_stats);
}

// ---- GroupNorm

GroupNorm::GroupNorm(GroupNormOptions o) : options(o) {
  TESSERA_CHECK(o.groups > 0 && o.channels > 0 && o.channels % o.groups == 0,
                "group_norm: channels={} do not divide into groups={}", o.channels, o.groups);
  register_parameter("weight", weight, o.affine ? empty_parameter({o.channels}) : Tensor());
  register_parameter("bias", bias, o.affine ? empty_parameter({o.channels}) : Tensor());
  draw();
}

void GroupNorm::reset(const InitKeys&) {
  if (options.affine) ones_(weight), zeros_(bias);
}

Tensor GroupNorm::forward(Tensor x) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() >= 2 && x.size(1) == options.channels,
                   "group_norm: x is {}; expected channels={} in dim 1", tessera::describe(x),
                   options.channels);
  return tessera::group_norm(x, options.groups, weight, bias, options.eps);
}

std::string GroupNorm::describe() const {
  return fmt::format("groups={}, channels={}, eps={}, affine={}", options.groups, options.channels,
                     options.eps, options.affine);
}

// ---- factories

std::shared_ptr<Conv1d> conv1d(const ConvOptions& o) { return std::make_shared<Conv1d>(o); }
std::shared_ptr<Conv1d> conv1d(int64_t in, int64_t out, PerDim kernel, PerDim stride,
                               Padding padding) {
  return std::make_shared<Conv1d>(in, out, kernel, stride, padding);
}
std::shared_ptr<Conv2d> conv2d(const ConvOptions& o) { return std::make_shared<Conv2d>(o); }
std::shared_ptr<Conv2d> conv2d(int64_t in, int64_t out, PerDim kernel, PerDim stride,
                               Padding padding) {
  return std::make_shared<Conv2d>(in, out, kernel, stride, padding);
}
std::shared_ptr<Conv3d> conv3d(const ConvOptions& o) { return std::make_shared<Conv3d>(o); }
std::shared_ptr<Conv3d> conv3d(int64_t in, int64_t out, PerDim kernel, PerDim stride,
                               Padding padding) {
  return std::make_shared<Conv3d>(in, out, kernel, stride, padding);
}
std::shared_ptr<ConvTranspose1d> conv_transpose1d(const ConvTransposeOptions& o) {
  return std::make_shared<ConvTranspose1d>(o);
}
std::shared_ptr<ConvTranspose2d> conv_transpose2d(const ConvTransposeOptions& o) {
  return std::make_shared<ConvTranspose2d>(o);
}
std::shared_ptr<ConvTranspose3d> conv_transpose3d(const ConvTransposeOptions& o) {
  return std::make_shared<ConvTranspose3d>(o);
}
std::shared_ptr<BatchNorm1d> batch_norm1d(const BatchNormOptions& o) {
  return std::make_shared<BatchNorm1d>(o);
}
std::shared_ptr<BatchNorm1d> batch_norm1d(int64_t channels) {
  return std::make_shared<BatchNorm1d>(channels);
}
std::shared_ptr<BatchNorm2d> batch_norm2d(const BatchNormOptions& o) {
  return std::make_shared<BatchNorm2d>(o);
}
std::shared_ptr<BatchNorm2d> batch_norm2d(int64_t channels) {
  return std::make_shared<BatchNorm2d>(channels);
}
std::shared_ptr<BatchNorm3d> batch_norm3d(const BatchNormOptions& o) {
  return std::make_shared<BatchNorm3d>(o);
}
std::shared_ptr<BatchNorm3d> batch_norm3d(int64_t channels) {
  return std::make_shared<BatchNorm3d>(channels);
}
std::shared_ptr<GroupNorm> group_norm(const GroupNormOptions& o) {
  return std::make_shared<GroupNorm>(o);
}
std::shared_ptr<GroupNorm> group_norm(int64_t groups, int64_t channels) {
  return std::make_shared<GroupNorm>(groups, channels);
}
std::shared_ptr<GroupNorm> instance_norm1d(const InstanceNormOptions& o) {
  return group_norm({o.channels, o.channels, o.eps, o.affine});
}
std::shared_ptr<GroupNorm> instance_norm2d(const InstanceNormOptions& o) {
  return instance_norm1d(o);
}
std::shared_ptr<GroupNorm> instance_norm3d(const InstanceNormOptions& o) {
  return instance_norm1d(o);
}
std::shared_ptr<Module> upsample(const InterpolateOptions& o) {
  return activation("Upsample", [=](Tensor x) { return interpolate(x, o); });
}

namespace {

template <class F, class... Options>
std::shared_ptr<Module> pool(const char* name, F function, const Options&... options) {
  return activation(name, [=](Tensor x) { return function(x, options...); });
}

}  // namespace

std::shared_ptr<Module> max_pool1d(PerDim kernel, const MaxPoolOptions& o) {
  return pool("MaxPool1d", tessera::max_pool1d, kernel, o);
}
std::shared_ptr<Module> max_pool2d(PerDim kernel, const MaxPoolOptions& o) {
  return pool("MaxPool2d", tessera::max_pool2d, kernel, o);
}
std::shared_ptr<Module> max_pool3d(PerDim kernel, const MaxPoolOptions& o) {
  return pool("MaxPool3d", tessera::max_pool3d, kernel, o);
}
std::shared_ptr<Module> avg_pool1d(PerDim kernel, const AvgPoolOptions& o) {
  return pool("AvgPool1d", tessera::avg_pool1d, kernel, o);
}
std::shared_ptr<Module> avg_pool2d(PerDim kernel, const AvgPoolOptions& o) {
  return pool("AvgPool2d", tessera::avg_pool2d, kernel, o);
}
std::shared_ptr<Module> avg_pool3d(PerDim kernel, const AvgPoolOptions& o) {
  return pool("AvgPool3d", tessera::avg_pool3d, kernel, o);
}
std::shared_ptr<Module> adaptive_avg_pool1d(PerDim output) {
  return pool("AdaptiveAvgPool1d", tessera::adaptive_avg_pool1d, output);
}
std::shared_ptr<Module> adaptive_avg_pool2d(PerDim output) {
  return pool("AdaptiveAvgPool2d", tessera::adaptive_avg_pool2d, output);
}
std::shared_ptr<Module> adaptive_avg_pool3d(PerDim output) {
  return pool("AdaptiveAvgPool3d", tessera::adaptive_avg_pool3d, output);
}
std::shared_ptr<Module> adaptive_max_pool1d(PerDim output) {
  return pool("AdaptiveMaxPool1d", tessera::adaptive_max_pool1d, output);
}
std::shared_ptr<Module> adaptive_max_pool2d(PerDim output) {
  return pool("AdaptiveMaxPool2d", tessera::adaptive_max_pool2d, output);
}
std::shared_ptr<Module> adaptive_max_pool3d(PerDim output) {
  return pool("AdaptiveMaxPool3d", tessera::adaptive_max_pool3d, output);
}

}  // namespace tessera::nn
