// With x [M, C], w [O, C] and y [M, O], where M counts batch and places: y = x w^T, dx = g w, dw =
// g^T x. Strides leave out places of x: those that are read are gathered first, and places of dx
// that were not are zeros.
#include "core/backend/cpu/conv/product.h"

#include <algorithm>

#include "core/backend/cpu/channels_last.h"
#include "core/base/boundary.h"
#include "core/base/isa.h"

namespace tessera::cpu {
namespace {

Gemm gemm_of(ConvRole role, const Meta& x, const Meta& w, const Meta& y) {
  const int64_t channels = x.shape[1], outputs = y.shape[1], rows = numel(y.shape) / outputs;
  Gemm g;
  g.dtype = x.dtype;
  switch (role) {
    case ConvRole::kOutput:
      g.m = rows, g.k = channels, g.n = outputs;
      g.a_m = channels, g.a_k = 1, g.b_k = w.strides[1], g.b_n = w.strides[0], g.c_m = outputs;
      break;
    case ConvRole::kInput:
      g.m = rows, g.k = outputs, g.n = channels;
      g.a_m = outputs, g.a_k = 1, g.b_k = w.strides[0], g.b_n = w.strides[1], g.c_m = channels;
      break;
    case ConvRole::kWeight:
      g.m = outputs, g.k = rows, g.n = channels;
      g.a_m = 1, g.a_k = outputs, g.b_k = channels, g.b_n = 1, g.c_m = channels;
  }
  return g;
}

bool reads_all(const Shape& x, const Shape& y) {
  return std::equal(x.begin() + 2, x.end(), y.begin() + 2, y.end());
}

// The places of x that a convolution reads, as a view.
Tensor read_places(const Tensor& x, const ConvAttributes::Window& window, const Shape& y) {
  Shape shape{x.shape()[0], x.shape()[1]};
  Strides strides{x.strides()[0], x.strides()[1]};
  for (int i = 0; i < window.stride.size(); ++i) {
    shape.push_back(y[i + 2]);
    strides.push_back(x.strides()[i + 2] * window.stride[i]);
  }
  return Tensor({shape, strides, x.dtype(), x.device()}, x.storage(), x.offset());
}

// A fault of oneDNN (issue 6035 there): where a 1 x 1 weight has strides, its gradient first
// gathers the places of x that are read, in whole blocks of channels. If x has fewer channels than
// a block, 8 with AVX2, this writes beyond the scratch memory, and the gradient is wrong. In bf16
// as in f32.
bool overruns_in_library(ConvRole role, const ConvAttributes::Window& window, const Meta& x) {
  constexpr int64_t kBlock = 16;  // the largest of any instruction set
  return role == ConvRole::kWeight && x.shape[1] < kBlock &&
         std::ranges::any_of(window.stride, [](int64_t s) { return s > 1; });
}

}  // namespace

bool is_conv_product(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                     const Meta& w, const Meta& y) {
  constexpr int64_t kLeast = limit("conv_product.least"), kDeep = 2 * limit("conv_product.pairs");
  const int64_t rows = numel(y.shape) / std::max<int64_t>(y.shape[1], 1);
  // In bf16 only gradients by the weight, summed over so few rows that they are packed at once;
  // conv_dot_rows and conv_dot_weight are faster for the others.
  const bool low = x.dtype == kBF16 && has_bf16_dot() && role == ConvRole::kWeight &&
                   rows <= kDeep && rows % 2 == 0 && x.shape[1] % 2 == 0 && y.shape[1] % 2 == 0;
  if (x.dtype == kBF16 && role == ConvRole::kWeight && rows % 2 == 0)
    meet("conv_product.pairs", rows / 2);
  const bool overruns = overruns_in_library(role, window, x);
  if ((x.dtype != kF32 && !low && !overruns) || window.groups != 1) return false;
  for (int i = 0; i < window.stride.size(); ++i)
    if (w.shape[i + 2] != 1 || window.pad_begin[i] != 0 || window.pad_end[i] > 0) return false;
  if (w.strides[0] != 1 && w.strides[1] != 1) return false;
  if (overruns) return true;
  meet("conv_product.least", std::min({x.shape[1], y.shape[1], rows}));
  return std::min({x.shape[1], y.shape[1], rows}) >= kLeast;
}

PlannedGemm plan_conv_product(ConvRole role, const Meta& x, const Meta& w, const Meta& y) {
  return PlannedGemm(gemm_of(role, x, w, y));
}

void run_conv_product(ConvRole role, const ConvAttributes::Window& window,
                      const PlannedGemm& product, const Tensor& x, const Tensor& w, const Tensor& y,
                      void* work) {
  const bool all = reads_all(x.shape(), y.shape());
  if (role == ConvRole::kInput) {
    const Tensor cot = as_channels_last(y);
    if (all) return product.run(cot.raw_values(), w.raw_values(), x.raw(), work);
    const Tensor places = read_places(x, window, y.shape()),
                 dense = empty(channels_last_meta(places.shape(), x.dtype(), x.device()));
    product.run(cot.raw_values(), w.raw_values(), dense.raw(), work);
    std::fill_n(x.data<float>(), x.numel(), 0.0f);
    return copy_values(places, dense);
  }
  const Tensor rows = as_channels_last(all ? x : read_places(x, window, y.shape()));
  if (role == ConvRole::kOutput)
    return product.run(rows.raw_values(), w.raw_values(), y.raw(), work);
  product.run(as_channels_last(y).raw_values(), rows.raw_values(), w.raw(), work);
}

}  // namespace tessera::cpu
