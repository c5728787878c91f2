// Golden cases of convolutional networks.
#include <gtest/gtest.h>

#include "core/ops/batch_norm.h"
#include "core/ops/conv.h"
#include "core/ops/interpolate.h"
#include "core/ops/pool.h"
#include "core/ops/views.h"
#include "tests/core/ops/golden.h"

namespace tessera::golden {
namespace {

using C = const Case&;

Call just(Tensor (*f)(C)) {
  return [f](C c) { return std::vector<Tensor>{f(c)}; };
}

// An attribute that is a number, a list of them, or missing.
PerDim per_dim(C c, const char* name, int64_t otherwise) {
  const auto& a = c.entry["attributes"];
  if (!a.contains(name)) return otherwise;
  if (a[name].is_array()) return PerDim(c.dims(name));
  return c.integer(name);
}
int64_t groups_of(C c) {
  return c.entry["attributes"].contains("groups") ? c.integer("groups") : 1;
}
Tensor bias_of(C c) { return c.has("bias") ? c["bias"] : Tensor(); }

using ConvFunction = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const ConvGeometry&);
template <ConvFunction F>
Tensor convolution(C c) {
  const auto& a = c.entry["attributes"];
  bool same = a.contains("padding") && a["padding"] == "same",
       valid = a.contains("padding") && a["padding"] == "valid";
  Padding padding = same ? Padding(kSame) : valid ? Padding(0) : per_dim(c, "padding", 0);
  return F(c["x"], c["weight"], bias_of(c),
           {.stride = per_dim(c, "stride", 1),
            .padding = padding,
            .dilation = per_dim(c, "dilation", 1),
            .groups = groups_of(c)});
}

using TransposeFunction = Tensor (*)(const Tensor&, const Tensor&, const Tensor&,
                                     const ConvTransposeOptions&);
template <TransposeFunction F>
Tensor transposed(C c) {
  return F(c["x"], c["weight"], bias_of(c),
           {.stride = per_dim(c, "stride", 1),
            .padding = per_dim(c, "padding", 0),
            .output_padding = per_dim(c, "output_padding", 0),
            .groups = groups_of(c),
            .dilation = per_dim(c, "dilation", 1)});
}

bool flag_of(C c, const char* name, bool otherwise) {
  return c.entry["attributes"].contains(name) ? c.flag(name) : otherwise;
}

using MaxFunction = Tensor (*)(const Tensor&, PerDim, const MaxPoolOptions&);
template <MaxFunction F>
Tensor largest(C c) {
  return F(c["x"], per_dim(c, "kernel", 1),
           {.stride = per_dim(c, "stride", 0),
            .padding = per_dim(c, "padding", 0),
            .dilation = per_dim(c, "dilation", 1),
            .ceil_mode = flag_of(c, "ceil_mode", false)});
}
using AvgFunction = Tensor (*)(const Tensor&, PerDim, const AvgPoolOptions&);
template <AvgFunction F>
Tensor average(C c) {
  bool divisor = c.entry["attributes"].contains("divisor_override");
  return F(c["x"], per_dim(c, "kernel", 1),
           {.stride = per_dim(c, "stride", 0),
            .padding = per_dim(c, "padding", 0),
            .ceil_mode = flag_of(c, "ceil_mode", false),
            .count_include_pad = flag_of(c, "count_include_pad", true),
            .divisor_override = divisor ? c.integer("divisor_override") : 0});
}
using AdaptiveFunction = Tensor (*)(const Tensor&, PerDim);
template <AdaptiveFunction F>
Tensor adaptive(C c) {
  return F(c["x"], per_dim(c, "kernel", 1));
}

Tensor given(C c, const char* input) { return c.has(input) ? c[input] : Tensor(); }

std::vector<Tensor> batch_normalised(C c) {
  Tensor mean = clone(c["mean"]), var = clone(c["var"]);
  BatchNormOptions o{
      .weight = given(c, "weight"), .bias = given(c, "bias"), .training = c.flag("training")};
  if (c.entry["attributes"].contains("momentum")) o.momentum = c.real("momentum");
  if (c.entry["attributes"].contains("eps")) o.eps = c.real("eps");
  Tensor y = batch_norm(c["x"], mean, var, o);
  return {y, mean, var};
}

Tensor interpolated(C c) {
  const auto& a = c.entry["attributes"];
  InterpolateOptions o{.align_corners = flag_of(c, "align_corners", false)};
  if (a.contains("size")) o.size = per_dim(c, "size", 1);
  if (a.contains("scale_factor")) {
    if (a["scale_factor"].is_array())
      for (double f : a["scale_factor"]) o.scale_factor.push_back(f);
    else
      o.scale_factor = {c.real("scale_factor")};
  }
  if (a.contains("mode")) o.mode = Interpolation::kLinear;
  return interpolate(c["x"], o);
}

}  // namespace

const Table& conv_table() {
  static const Table table = {
      {"conv1d", just(convolution<conv1d>)},
      {"conv2d", just(convolution<conv2d>)},
      {"conv3d", just(convolution<conv3d>)},
      {"conv_transpose1d", just(transposed<conv_transpose1d>)},
      {"conv_transpose2d", just(transposed<conv_transpose2d>)},
      {"conv_transpose3d", just(transposed<conv_transpose3d>)},
      {"max_pool1d", just(largest<max_pool1d>)},
      {"max_pool2d", just(largest<max_pool2d>)},
      {"max_pool3d", just(largest<max_pool3d>)},
      {"avg_pool1d", just(average<avg_pool1d>)},
      {"avg_pool2d", just(average<avg_pool2d>)},
      {"avg_pool3d", just(average<avg_pool3d>)},
      {"adaptive_avg_pool1d", just(adaptive<adaptive_avg_pool1d>)},
      {"adaptive_avg_pool2d", just(adaptive<adaptive_avg_pool2d>)},
      {"adaptive_avg_pool3d", just(adaptive<adaptive_avg_pool3d>)},
      {"adaptive_max_pool2d", just(adaptive<adaptive_max_pool2d>)},
      {"batch_norm", batch_normalised},
      {"group_norm", just([](C c) {
         return group_norm(c["x"], c.integer("groups"), given(c, "weight"), given(c, "bias"));
       })},
      {"instance_norm", just([](C c) { return instance_norm(c["x"], c["weight"], c["bias"]); })},
      {"interpolate", just(interpolated)},
  };
  return table;
}

TEST(Golden, Convolutional) { check_all(conv_table()); }

}  // namespace tessera::golden
