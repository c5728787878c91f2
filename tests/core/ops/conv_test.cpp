// Convolutions in the library's dtypes against f64, over memory formats, and what they refuse.
// Values and gradients are in the sweeps (every sample against finite differences) and the golden
// cases (PyTorch's).
#include "core/ops/conv.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/autograd/autograd.h"
#include "core/base/isa.h"
#include "core/base/parallel.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "tests/support/guarded_kernels.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

double difference(const Tensor& a, const Tensor& b) {
  NoGrad off;
  EXPECT_EQ(a.shape(), b.shape());
  return amax(abs(cast(a, kF64) - cast(b, kF64))).item<double>() /
         amax(abs(cast(b, kF64))).item<double>();
}

struct Results {
  Tensor y, dx, dw;
};
Results evaluate(const Tensor& x, const Tensor& w, const ConvGeometry& o,
                 const Tensor& cotangent = {}) {
  Tensor a = x.detach().requires_grad_(), b = w.detach().requires_grad_();
  Tensor y = x.ndim() == 5 ? conv3d(a, b, {}, o) : conv2d(a, b, {}, o);
  Tensor g = cotangent.defined() ? cotangent : cast(sample_values(y.shape(), -1, 1, 3), y.dtype());
  Tensors out{y}, in{a, b}, cot{g}, d = grad(out, in, cot);
  return {y.detach(), d[0], d[1]};
}

// Sizes at which the library takes its fast ways: channels of whole and of broken vectors, strided
// 1 x 1, depthwise, three spatial dims; and where ours are used instead.
struct Setting {
  Shape x, w;
  ConvGeometry options;
};
std::vector<Setting> settings() {
  return {{{2, 3, 33, 30}, {32, 3, 7, 7}, {.stride = 2, .padding = 3}},
          {{2, 32, 14, 15}, {48, 32, 3, 3}, {.padding = 1}},
          {{2, 32, 14, 14}, {64, 32, 1, 1}, {.stride = 2}},
          {{6, 2, 8, 8}, {4, 2, 1, 1}, {.stride = 2}},
          {{3, 5, 32, 32}, {9, 5, 1, 1}, {.stride = 2}},
          {{2, 12, 16, 16}, {8, 12, 1, 1}, {.stride = {1, 2}}},
          {{2, 8, 16, 16}, {6, 4, 1, 1}, {.stride = 2, .groups = 2}},
          {{2, 64, 9, 10}, {80, 64, 1, 1}, {}},
          {{3, 72, 13, 12}, {64, 72, 1, 1}, {.stride = {2, 3}}},
          {{3, 72, 13, 12}, {64, 72, 3, 3}, {.stride = {2, 1}, .padding = 1}},
          {{2, 64, 9, 6}, {80, 64, 3, 2}, {.padding = {1, 2}, .dilation = {2, 3}}},
          {{4, 32, 40, 38}, {32, 32, 3, 3}, {.padding = 1}},
          {{2, 64, 9, 11}, {96, 64, 3, 3}, {.padding = {2, 1}}},
          {{5, 96, 8, 7}, {32, 96, 3, 3}, {.padding = {0, 2}}},
          {{11, 32, 10, 11}, {64, 32, 3, 3}, {.padding = {2, 1}}},
          {{3, 32, 24, 22}, {128, 32, 3, 3}, {.padding = 1}},
          {{2, 64, 61, 60}, {16, 64, 3, 3}, {.stride = {2, 1}, .padding = {0, 2}}},
          {{3, 32, 13, 12}, {64, 32, 3, 3}, {.stride = {2, 3}, .padding = 1}},
          {{2, 64, 9, 10}, {32, 64, 2, 3}, {.padding = {1, 3}, .dilation = {3, 2}}},
          {{6, 32, 12, 11}, {48, 32, 5, 5}, {.padding = 2}},
          {{1, 128, 9, 10}, {160, 128, 3, 3}, {.padding = 1}},
          {{1, 128, 18, 15}, {160, 128, 3, 3}, {.stride = 2, .padding = 1}},
          {{1, 17, 9, 11}, {19, 17, 3, 3}, {.padding = 1, .dilation = 2}},
          {{2, 32, 12, 12}, {32, 1, 3, 3}, {.padding = 1, .groups = 32}},
          {{1, 16, 5, 7, 6}, {24, 8, 3, 3, 3}, {.padding = 1, .groups = 2}}};
}

// At least `tolerance`, and what a sum in f32 of so many terms, one after the other, may add to it:
// partial sums grow as the root of their number, and so does the sum that they are compared with,
// so rounding each adds some 0.4 sqrt(terms) / 2^24 of it.
double tolerance_of(int64_t terms, double tolerance) {
  return std::max(tolerance, std::sqrt(double(terms)) * 0x1p-24);
}

void expect_close_to_double(DType dtype, double tolerance) {
  for (const Setting& s : settings()) {
    SCOPED_TRACE(to_string(s.x) + " " + to_string(s.w));
    Tensor x = cast(sample_values(s.x, -1, 1, 1), dtype),
           w = cast(sample_values(s.w, -1, 1, 2), dtype);
    Results got = evaluate(x, w, s.options),
            want = evaluate(cast(x, kF64), cast(w, kF64), s.options);
    EXPECT_EQ(got.y.dtype(), dtype);
    const int64_t weights = numel(s.w), places = got.y.numel() / got.y.size(1);
    EXPECT_LT(difference(got.y, want.y), tolerance_of(weights / s.w[0], tolerance));
    EXPECT_LT(difference(got.dx, want.dx), tolerance_of(weights / s.w[1], tolerance));
    EXPECT_LT(difference(got.dw, want.dw), tolerance_of(places, tolerance));
  }
}

TEST(Conv, SinglePrecisionIsCloseToDouble) { expect_close_to_double(kF32, 2e-6); }
// Half an ulp, and the cotangent of the f64 run is not rounded: another.
TEST(Conv, SixteenBitFloatsAreSummedWide) {
  expect_close_to_double(kBF16, 0x1p-8);
  expect_close_to_double(kF16, 0x1p-11);
}

// Element by element, in tiles of both sizes that there are for it, in one block and in several:
// what a fast way adds to rounding is below 1e-4 of a usual element.
TEST(Conv, ALowGradientByTheWeightErrsAsRoundingDoes) {
  for (const Shape& s : {Shape{2, 64, 7, 7}, Shape{3, 64, 14, 14}, Shape{5, 32, 56, 56},
                         Shape{30, 32, 8, 8}, Shape{40, 32, 16, 16}, Shape{9, 32, 9, 26}}) {
    SCOPED_TRACE(to_string(s));
    auto dw = [&](DType dtype) {
      Tensor x = cast(cast(sample_values(s, -1, 2, 1), kBF16), dtype),
             w = cast(zeros({32, s[1], 3, 3}), dtype).requires_grad_(),
             g = cast(cast(sample_values({s[0], 32, s[2], s[3]}, -1, 1, 3), kBF16), dtype);
      Tensor y = conv2d(x, w, {}, {.padding = 1});
      return cast(grad({&y, 1}, {&w, 1}, {&g, 1})[0], kF64);
    };
    const Tensor got = dw(kBF16), want = dw(kF64);
    const double usual = sqrt(mean(square(want))).item<double>();
    EXPECT_LT(amax(abs(got - want) - abs(want) * 0x1p-8).item<double>(), 1e-4 * usual);
  }
}

TEST(Conv, AnyFormatOfOperandsGivesTheSameBits) {
  for (const Setting& s : settings())
    for (DType dtype : {kF32, kBF16}) {
      SCOPED_TRACE(to_string(s.x) + " " + to_string(s.w));
      Tensor x = cast(sample_values(s.x, -1, 1, 1), dtype),
             w = cast(sample_values(s.w, -1, 1, 2), dtype);
      Results want = evaluate(x, w, s.options);
      constexpr MemoryFormat kLast = MemoryFormat::kChannelsLast;
      EXPECT_TRUE(want.y.is_contiguous(kLast));
      EXPECT_TRUE(want.dx.is_contiguous(kLast));
      for (auto& [a, b] : {std::pair{x.contiguous(kLast), w}, {x, w.contiguous(kLast)}}) {
        Results got = evaluate(a, b, s.options);
        EXPECT_EQ(difference(got.y, want.y), 0);
        EXPECT_EQ(difference(got.dx, want.dx), 0);
        EXPECT_EQ(difference(got.dw, want.dw), 0);
      }
    }
}

TEST(Conv, AWeightMayBeABroadcastView) {
  NoGrad off;
  Tensor x = sample_values({2, 6, 9, 8}, -1, 1, 1), one = sample_values({1, 1, 3, 3}, -1, 1, 2);
  const ConvGeometry depthwise{.padding = 1, .groups = 6};
  Tensor view = expand(one, {6, 1, 3, 3});
  EXPECT_EQ(difference(conv2d(x, view, {}, depthwise), conv2d(x, view.clone(), {}, depthwise)), 0);
  Tensor wide = expand(one, {5, 6, 3, 3});
  EXPECT_EQ(difference(conv2d(x, wide, {}, {}), conv2d(x, wide.clone(), {}, {})), 0);
  EXPECT_EQ(difference(conv_transpose2d(x, expand(one, {6, 4, 3, 3})),
                       conv_transpose2d(x, expand(one, {6, 4, 3, 3}).clone())),
            0);
}

// The cotangent of a weight's gradient is such a view.
TEST(Conv, SecondDerivativesThroughASumOfTheWeightsGradient) {
  auto second = [](DType dtype) {
    Tensor x = cast(sample_values({2, 3, 6, 5}, -1, 1, 1), dtype).requires_grad_(),
           w = cast(sample_values({4, 3, 3, 3}, -1, 1, 2), dtype).requires_grad_();
    Tensor y = sum(square(conv2d(x, w)));
    Tensor dw = grad({&y, 1}, {&w, 1}, {}, {.create_graph = true})[0], total = sum(dw);
    return grad({&total, 1}, {&x, 1})[0];
  };
  EXPECT_LE(difference(second(kF32), second(kF64)), 1e-5);
}

// Code of the library is not instrumented by sanitizers. Where a 1 x 1 weight has strides, it wrote
// beyond its scratch for fewer channels than a block.
TEST(Conv, KernelsWriteToTheirScratchAndResultsAlone) {
  const auto run = [](const Shape& x, const Shape& w, const ConvGeometry& o, DType t) {
    const Tensor a = cast(sample_values(x, -1, 1, 1), t), b = cast(sample_values(w, -1, 1, 2), t);
    const test::GuardedKernels guarded;
    evaluate(a, b, o);
  };
  for (DType t : {kF32, kBF16, kF16}) {
    for (const Setting& s : settings()) run(s.x, s.w, s.options, t);
    for (int64_t channels = 1; channels <= 17; ++channels)
      run({4, channels, 24, 20}, {9, channels, 1, 1}, {.stride = {1, 3}}, t);
  }
}

// Kernels of 3 x 3 without strides, in whole panels of channels, cut into blocks by threads.
TEST(Conv, ThreadsMayComeAndGo) {
  if (cpu::current_isa() != cpu::Isa::kV4) GTEST_SKIP() << "oneDNN's bits depend on threads";
  const int before = num_threads();
  for (DType dtype : {kF32, kBF16})
    for (const Shape& s : {Shape{4, 32, 14, 14}, Shape{3, 32, 30, 30}, Shape{3, 32, 56, 56}}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + to_string(s));
      Tensor x = cast(sample_values(s, -1, 1, 1), dtype),
             w = cast(sample_values({64, 32, 3, 3}, -1, 1, 2), dtype);
      set_num_threads(1);
      const Results want = evaluate(x, w, {.padding = 1});
      for (int threads : {2, 3}) {
        set_num_threads(threads);
        const Results got = evaluate(x, w, {.padding = 1});
        EXPECT_EQ(difference(got.y, want.y), 0);
        EXPECT_EQ(difference(got.dx, want.dx), 0);
        EXPECT_EQ(difference(got.dw, want.dw), 0);
      }
    }
  set_num_threads(before);
}

// Images alone have few tiles, those of a batch many.
TEST(Conv, ASamplesBitsAreTheSameInEveryBatch) {
  if (cpu::current_isa() != cpu::Isa::kV4) GTEST_SKIP() << "oneDNN's bits depend on the batch";
  for (DType dtype : {kF32, kBF16})
    for (const Shape& s : {Shape{12, 32, 8, 8}, Shape{3, 64, 32, 32}, Shape{33, 128, 14, 14}}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + to_string(s));
      Tensor x = cast(sample_values(s, -1, 1, 1), dtype),
             w = cast(sample_values({64, s[1], 3, 3}, -1, 1, 2), dtype),
             g = cast(sample_values({s[0], 64, s[2], s[3]}, -1, 1, 3), dtype);
      const Results all = evaluate(x, w, {.padding = 1}, g);
      for (int64_t i : {int64_t(0), s[0] - 1}) {
        const Results one =
            evaluate(slice(x, 0, i, i + 1), w, {.padding = 1}, slice(g, 0, i, i + 1));
        EXPECT_EQ(difference(one.y, slice(all.y, 0, i, i + 1)), 0);
        EXPECT_EQ(difference(one.dx, slice(all.dx, 0, i, i + 1)), 0);
      }
    }
}

// Left of column 10 all is zero: so is what sees no other pixel, in its whole, though its tile may
// hold others; and nothing of them is in what sees small values beside large ones.
TEST(Conv, ZerosAndSmallValuesKeepToThemselves) {
  constexpr int64_t kZero = 10, kEdge = 24;
  for (DType dtype : {kF64, kF32, kBF16, kF16}) {
    SCOPED_TRACE(name_of(dtype));
    auto scaled = [&](int64_t channels, int64_t key, double by) {
      const Shape s{2, channels, kEdge, kEdge};
      Tensor t = sample_values(s, -1, 1, key);
      const Tensor parts[] = {slice(t, 3, 0, kZero) * by, slice(t, 3, kZero, kEdge)};
      return cast(cat(parts, 3), dtype);
    };
    auto left = [](const Tensor& t) { return slice(t, 3, 0, kZero - 1); };
    Tensor w = cast(sample_values({32, 64, 3, 3}, -1, 1, 2), dtype);
    const Results zero = evaluate(scaled(64, 1, 0), w, {.padding = 1}, scaled(32, 3, 0));
    EXPECT_EQ(amax(abs(cast(left(zero.y), kF64))).item<double>(), 0);
    EXPECT_EQ(amax(abs(cast(left(zero.dx), kF64))).item<double>(), 0);
    EXPECT_GT(amax(abs(cast(zero.y, kF64))).item<double>(), 1);

    const Tensor x = scaled(64, 1, 0x1p-10), g = scaled(32, 3, 0x1p-10);
    const Results got = evaluate(x, w, {.padding = 1}, g),
                  want = evaluate(cast(x, kF64), cast(w, kF64), {.padding = 1}, cast(g, kF64));
    const double tolerance = dtype == kBF16 ? 0x1p-8 : dtype == kF16 ? 0x1p-11 : 2e-6;
    EXPECT_LT(difference(left(got.y), left(want.y)), tolerance);
    EXPECT_LT(difference(left(got.dx), left(want.dx)), tolerance);
  }
}

// What is not read of x, here more than a step, is beyond what the library takes.
TEST(Conv, OutputPaddingBeyondTheStride) {
  Tensor x = cast(sample_values({1, 3, 4, 4}, -1, 1, 1), kF32),
         w = cast(sample_values({3, 2, 2, 2}, -1, 1, 2), kF32);
  ConvTransposeOptions o{.output_padding = 3, .dilation = 4};
  Tensor y = conv_transpose2d(x, w, {}, o);
  EXPECT_LT(difference(y, conv_transpose2d(cast(x, kF64), cast(w, kF64), {}, o)), 1e-6);

  Tensor x_low = cast(sample_values({2, 32, 9, 9}, -1, 1, 3), kBF16),
         w_low = cast(sample_values({32, 32, 3, 3}, -1, 1, 4), kBF16);
  ConvTransposeOptions wide{.output_padding = 2, .dilation = 3};
  Tensor low = conv_transpose2d(x_low, w_low, {}, wide),
         exact = conv_transpose2d(cast(x_low, kF64), cast(w_low, kF64), {}, wide);
  EXPECT_LT(difference(low, exact), 0.004 * amax(abs(exact)).item<double>());
}

TEST(Conv, AnEmptyBatchGivesAnEmptyResultAndNoGradient) {
  Tensor x = zeros({0, 3, 5, 5}), w = ones({4, 3, 3, 3}).requires_grad_();
  Tensor y = conv2d(x, w);
  EXPECT_EQ(y.shape(), Shape({0, 4, 3, 3}));
  sum(y).backward();
  EXPECT_EQ(amax(abs(w.grad())).item<float>(), 0);
}

TEST(Conv, RefusesByNameAndValue) {
  Tensor x = zeros({2, 4, 5, 5}), w = zeros({6, 4, 3, 3});
  auto refused = [&](const Tensor& a, const Tensor& b, const Tensor& bias, const ConvGeometry& o,
                     const char* text) {
    expect_contains(error_of([&] { conv2d(a, b, bias, o); }), text);
  };
  refused(zeros({4, 5}), w, {}, {}, "conv2d: x is f32[4, 5]");
  refused(x, zeros({6, 4, 3}), {}, {}, "conv2d: weight is f32[6, 4, 3]");
  refused(x, w, zeros({4}), {}, "conv2d: bias is f32[4]");
  refused(x, zeros({6, 3, 3, 3}), {}, {}, "has 4 channels");
  refused(x, zeros({5, 2, 3, 3}), {}, {.groups = 2}, "groups=2");
  refused(x, w, {}, {.groups = 0}, "groups=0");
  refused(x, w, {}, {.stride = 0}, "conv2d: stride [0]");
  refused(x, w, {}, {.stride = {1, 2, 3}}, "conv2d: stride [1, 2, 3]");
  refused(x, w, {}, {.padding = -1}, "conv2d: padding [-1]");
  refused(x, w, {}, {.dilation = {0, 1}}, "conv2d: dilation [0, 1]");
  refused(x, w, {}, {.dilation = 3}, "does not fit into x [2, 4, 5, 5]");
  refused(x, w, {}, {.stride = 2, .padding = kSame}, "padding=same with stride [2, 2]");
  refused(x, cast(w, kF64), {}, {}, "one float dtype");
  expect_contains(
      error_of([&] { conv_transpose2d(x, w.transpose(0, 1), {}, {.output_padding = 1}); }),
      "output_padding [1, 1]");
}

TEST(ChannelsLast, IsStridesOnly) {
  constexpr MemoryFormat kLast = MemoryFormat::kChannelsLast;
  Tensor x = sample_values({2, 3, 4, 5}, -1, 1, 1), y = x.contiguous(kLast);
  EXPECT_EQ(y.shape(), x.shape());
  EXPECT_EQ(y.strides(), Strides({60, 1, 15, 3}));
  EXPECT_TRUE(y.is_contiguous(kLast) && !y.is_contiguous());
  EXPECT_EQ(difference(y, x), 0);
  EXPECT_TRUE(y.contiguous(kLast).is_same(y));
  EXPECT_TRUE(difference(y.contiguous(), x) == 0 && y.contiguous().is_contiguous());
  EXPECT_EQ(relu(y).strides(), y.strides());
  EXPECT_EQ(sample_values({2, 3, 2, 2, 2}, -1, 1, 1).to(kLast).strides(),
            Strides({24, 1, 12, 6, 3}));
  expect_contains(error_of([&] {
                    sample_values({2, 3}, -1, 1, 1).contiguous(kLast);
                  }),
                  "f64[2, 3]");
}

}  // namespace
}  // namespace tessera
