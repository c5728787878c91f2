// Convolutions by cuDNN, and what is joined to them, beside those of our own kernels: which of the
// two computes, and what comes of it.
#include <set>

#include "core/dispatch/dispatch.h"
#include "core/ops/conv_grad_norm.h"
#include "core/ops/conv_norm.h"
#include "core/ops/create.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "tests/cuda/graphs.h"

namespace tessera::cuda {
namespace {

/// The name under which a kernel of batch-norm is counted.
const char* norm_kernel(DType t, std::string_view entry) {
  static std::set<std::string> names;
  return names.insert(fmt::format("batch_norm_{}_{}", name_of(t), entry)).first->c_str();
}

struct Case {
  Shape x, w;
  ConvGeometry geometry;
};
Tensor conv_of(const Case& c, const Tensor& x, const Tensor& w) {
  switch (c.x.size()) {
    case 3: return conv1d(x, w, {}, c.geometry);
    case 4: return conv2d(x, w, {}, c.geometry);
    default: return conv3d(x, w, {}, c.geometry);
  }
}
ConvAttributes::Window window_of(const Case& c) {
  const auto all = [&](const PerDim& n) { return n.expand(c.x.size() - 2, 0, "test", "window"); };
  const Dims padding = all(c.geometry.padding.both());
  return {all(c.geometry.stride), all(c.geometry.dilation), padding, padding, c.geometry.groups};
}
std::vector<Tensor> results(const PrimRef& prim, std::vector<Tensor> in) {
  const Tensors all = dispatch(prim, in);
  return std::vector<Tensor>(all.begin(), all.end());
}
/// Calls f(dtype, case, form) for each case without and with all parts of a norm in each dtype, and
/// for the first in bf16 with every part of them.
template <class C, class F>
void for_each_form(const std::vector<C>& cases, const F& f) {
  for (DType t : kTypes)
    for (const C& c : cases)
      for (int form = 0; form < 16; form += t == kBF16 && &c == &cases[0] ? 1 : 15) {
        SCOPED_TRACE(fmt::format("{}, {}, {}", &c - &cases[0], name_of(t), form));
        f(t, c, BatchNormForm{bool(form & 1), bool(form & 2), bool(form & 4), bool(form & 8)});
      }
}
TEST_F(CudaGraphs, ConvolutionsAndTheirGradients) {
  const Case cases[] = {{{2, 8, 9, 7}, {16, 8, 3, 3}, {.padding = 1}},
                        {{2, 3, 12, 12}, {8, 3, 5, 5}, {.stride = 2, .padding = 2}},
                        {{2, 16, 6, 6}, {8, 16, 1, 1}, {}},
                        {{2, 16, 6, 6}, {8, 16, 1, 1}, {.stride = 2}},
                        {{2, 8, 8, 8}, {8, 2, 3, 3}, {.padding = 1, .groups = 4}},
                        {{2, 6, 9, 9}, {6, 1, 3, 3}, {.padding = 2, .dilation = 2, .groups = 6}},
                        {{2, 4, 9, 8}, {6, 4, 2, 3}, {.padding = kSame}},  // one more behind
                        {{3, 5, 20}, {7, 5, 4}, {.stride = 3, .padding = 1}},
                        {{2, 4, 4, 5, 6}, {6, 4, 3, 2, 3}, {.padding = 1}}};
  for (DType t : kTypes)
    for (const Case& c : cases) {
      SCOPED_TRACE(fmt::format("{} with {}, {}", to_string(c.x), to_string(c.w), name_of(t)));
      const std::vector<Tensor> in{values(c.x, t, 1), values(c.w, t, 2)};
      compare(
          [&] {
            return with_gradients(
                [&](const std::vector<Tensor>& v) { return conv_of(c, v[0], v[1]); }, in);
          },
          t,
          {{"cudnn convolution", 1},
           {"cudnn convolution_data", 1},
           {"cudnn convolution_filter", 1}});
    }
}
TEST_F(CudaGraphs, ConvolutionsOfOperandsThatLieOtherwise) {
  const Case c{{2, 8, 9, 7}, {16, 8, 3, 3}, {.padding = 1}};
  for (DType t : kTypes) {
    const Tensor turned = permute(values({2, 7, 9, 8}, t, 1), {0, 3, 2, 1});
    const Tensor part = narrow(values({2, 8, 9, 9}, t, 1), 3, 1, 7);
    const Tensor shifted = reshape(narrow(values({2 * 8 * 9 * 7 + 1}, t, 1), 0, 1, 2 * 8 * 9 * 7),
                                   {2, 9, 7, 8});  // begins at no multiple of 16 bytes
    for (const Tensor& x : {turned, part, permute(shifted, {0, 3, 1, 2})})
      compare([&] { return std::vector{conv_of(c, x, values(c.w, t, 2))}; }, t,
              {{"cudnn convolution", 1}});
  }
}

TEST_F(CudaGraphs, MomentsOfConvolutions) {
  for (DType t : kTypes) {
    const Tensor x = values({3, 8, 6, 5}, t, 1) + 0.5, w = values({16, 8, 3, 3}, t, 2);
    compare(
        [&] {
          return results(stats_of_conv(), {x, w});
        },
        t, {{"cudnn convolution", 1}, {norm_kernel(t, "moments_of_sums"), t == kF32 ? 0 : 1}});
  }
}

// One graph, with no kernel behind it; operands that lie otherwise are copied.
TEST_F(CudaGraphs, ConvolutionsThatNormalise) {
  const std::vector<Case> cases{{{3, 8, 6, 5}, {16, 8, 3, 3}, {.padding = 1}},
                                {{2, 8, 9}, {6, 4, 3}, {.stride = 2, .groups = 2}},
                                {{2, 3, 4, 5, 4}, {5, 3, 2, 3, 1}, {}}};
  for_each_form(cases, [](DType t, const Case& c, const BatchNormForm& of) {
    const Tensor x = values(c.x, t, 1), w = values(c.w, t, 2), plain = conv_of(c, x, w);
    const PrimRef prim = conv_norm_op({{window_of(c)}, {1e-5, of}});
    std::vector<Tensor> in{x, w, values({w.size(0)}, kF32, 3), values({w.size(0)}, kF32, 4) + 1.0};
    if (of.weight) in.push_back(values({w.size(0)}, kF32, 5) + 1.0);
    if (of.bias) in.push_back(select(values({w.size(0), 2}, kF32, 6), 1, 0));
    if (of.residual) in.push_back(values(plain.shape(), t, 7));
    compare([&] { return results(prim, in); }, t,
            {{"cudnn convolution", 1}, {norm_kernel(t, "normalize"), 0}});
  });
}
// As our own kernel does: what is no number is not made 0 by the relu.
TEST_F(CudaGraphs, ConvolutionsThatNormaliseKeepNan) {
  const Tensor x = values({2, 8, 6, 5}, kBF16, 1), w = values({16, 8, 3, 3}, kBF16, 2),
               mean = values({16}, kF32, 3), var = full({16}, -1.0, {kF32, device_of(0)});
  const PrimRef prim = conv_norm_op(
      {{window_of({{2, 8, 6, 5}, {16, 8, 3, 3}, {.padding = 1}})}, {1e-5, {.relu = true}}});
  const auto compute = [&] {
    std::vector<Tensor> in{x, w, mean, var};
    return std::vector{isnan(dispatch1(prim, in)).to(kF32)};
  };
  compare(compute, kF32, {{"cudnn convolution", 1}});
  EXPECT_EQ(amin(compute()[0]).item<float>(), 1.0f);
}

// What batch-norm's derivative takes, in one graph with one kernel behind it; our own kernel reads
// it once more. No engine takes both sums with strides.
TEST_F(CudaGraphs, GradientsOfConvolutionsThatSum) {
  struct Sums {
    Case of;
    Shape y;
    bool strides;
  };
  const std::vector<Sums> cases{
      {{{3, 8, 6, 5}, {16, 8, 3, 3}, {.padding = 1}}, {3, 16, 6, 5}, false},
      {{{2, 8, 9}, {6, 4, 3}, {.stride = 2, .groups = 2}}, {2, 6, 4}, true},
      {{{2, 3, 4, 5, 4}, {5, 3, 2, 3, 1}, {}}, {2, 5, 3, 3, 4}, false}};
  for_each_form(cases, [](DType t, const Sums& c, const BatchNormForm& of) {
    const Shape &x = c.of.x, &w = c.of.w;
    const PrimRef prim =
        conv_grad_norm_op({{window_of(c.of), Dims(std::span(x).subspan(2))}, {1e-5, of}});
    std::vector<Tensor> in{values(c.y, t, 1), values(w, t, 2), values(x, t, 3),
                           select(values({x[1], 2}, kF32, 4), 1, 0), values({x[1]}, kF32, 5) + 1.0};
    if (of.relu) in.push_back(values(x, t, 6));
    if (of.residual) in.push_back(values(x, t, 7));
    const bool own = t == kF32 || c.strides;
    compare([&] { return results(prim, in); }, t,
            {{"cudnn convolution_data", 1},
             {norm_kernel(t, "masked_sums"), own},
             {norm_kernel(t, "join_sums"), 1}});
  });
}
// As batch-norm's own kernel does: where y is no number the gradient is 0.
TEST_F(CudaGraphs, GradientsOfConvolutionsWhereAReluWasNan) {
  const PrimRef prim = conv_grad_norm_op(
      {{window_of({{2, 8, 6, 5}, {16, 8, 3, 3}, {.padding = 1}}), {6, 5}}, {1e-5, {.relu = true}}});
  const Shape x{2, 8, 6, 5};
  std::vector<Tensor> in{values({2, 16, 6, 5}, kBF16, 1),
                         values({16, 8, 3, 3}, kBF16, 2),
                         values(x, kBF16, 3),
                         values({8}, kF32, 4),
                         values({8}, kF32, 5) + 1.0,
                         full(x, NAN, {kBF16, device_of(0)})};
  const auto compute = [&] { return std::vector{dispatch(prim, in)[0]}; };
  compare(compute, kBF16, {{"cudnn convolution_data", 1}});
  EXPECT_EQ(amax(abs(compute()[0])).to(kF32).item<float>(), 0.0f);
}

}  // namespace
}  // namespace tessera::cuda
