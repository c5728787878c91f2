// Golden cases of convolutional networks.
#include <gtest/gtest.h>

#include "core/ops/conv.h"
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

using ConvFunction = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const ConvOptions&);
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

}  // namespace

const Table& conv_table() {
  static const Table table = {
      {"conv1d", just(convolution<conv1d>)},
      {"conv2d", just(convolution<conv2d>)},
      {"conv3d", just(convolution<conv3d>)},
      {"conv_transpose1d", just(transposed<conv_transpose1d>)},
      {"conv_transpose2d", just(transposed<conv_transpose2d>)},
      {"conv_transpose3d", just(transposed<conv_transpose3d>)},
  };
  return table;
}

TEST(Golden, Convolutional) { check_all(conv_table()); }

}  // namespace tessera::golden
