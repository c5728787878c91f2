// Pooling and batch-norm over memory formats, dtypes and threads, and what they refuse. Values and
// gradients are in the sweeps (every sample against finite differences) and the golden cases
// (PyTorch's).
#include "core/ops/pool.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/autograd/autograd.h"
#include "core/base/parallel.h"
#include "core/ops/batch_norm.h"
#include "core/ops/create.h"
#include "core/ops/interpolate.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

constexpr MemoryFormat kLast = MemoryFormat::kChannelsLast;

double difference(const Tensor& a, const Tensor& b) {
  NoGrad off;
  EXPECT_EQ(a.shape(), b.shape());
  return amax(abs(cast(a, kF64) - cast(b, kF64))).item<double>();
}

Tensor values(const Shape& shape, DType dtype = kF32, uint64_t key = 1) {
  return cast(sample_values(shape, -1, 1, key), dtype);
}

// Result and gradient by x of a function of one tensor.
template <class F>
Tensors both(F f, const Tensor& x) {
  Tensor a = x.detach().requires_grad_();
  Tensor y = f(a);
  Tensors out{y}, in{a}, cot{values(y.shape(), y.dtype(), 7)};
  return {y.detach(), grad(out, in, cot)[0]};
}

template <class F>
void expect_any_format(F f) {
  Tensor x = values({2, 19, 9, 8});
  Tensors want = both(f, x), got = both(f, x.contiguous(kLast));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(difference(got[size_t(i)], want[size_t(i)]), 0);
    EXPECT_TRUE(got[size_t(i)].is_contiguous(kLast));
  }
}

TEST(Pool, AnyFormatGivesTheSameBitsChannelsLast) {
  expect_any_format([](const Tensor& x) { return max_pool2d(x, 3, {.stride = 2, .padding = 1}); });
  expect_any_format([](const Tensor& x) { return avg_pool2d(x, 3, {.stride = 2, .padding = 1}); });
  expect_any_format([](const Tensor& x) { return adaptive_avg_pool2d(x, {4, 3}); });
  expect_any_format([](const Tensor& x) { return batch_norm_moments(x, {}, {}, 1e-5).y; });
}

TEST(Pool, IndicesArePlacesOfTheLargest) {
  Tensor x = values({2, 3, 6, 5});
  auto [y, at] = max_pool_with_indices(x, 2, 2);
  EXPECT_EQ(at.dtype(), kI64);
  Tensor flat = reshape(x, {2, 3, 30});
  for (int64_t n = 0; n < 2; ++n)
    for (int64_t c = 0; c < 3; ++c)
      EXPECT_EQ(flat[n][c][at[n][c][2][1].item<int64_t>()].item<float>(),
                y[n][c][2][1].item<float>());
}

// Whole vectors of channels and a rest: the first of equal values is chosen, or the last NaN.
TEST(Pool, TheLargestIsTheFirstOfEqualOnesInEveryDType) {
  constexpr int64_t kChannels = 37, kRows = 7, kColumns = 6;
  Tensor exact = round(sample_values({2, kChannels, kRows, kColumns}, -3, 3, 1));
  double* x = exact.data<double>();
  for (int64_t i = 0; i < exact.numel(); i += 101) x[i] = std::nan("");
  for (DType dtype : {kF64, kF32, kBF16, kF16}) {
    SCOPED_TRACE(name_of(dtype));
    auto [y, at] = max_pool_with_indices(cast(exact, dtype), 3, 2, {.stride = 2, .padding = 1});
    y = cast(y, kF64).contiguous(), at = at.contiguous();
    ASSERT_EQ(y.shape(), Shape({2, kChannels, 4, 3}));
    for (int64_t i = 0; i < y.numel(); ++i) {
      const double* image = x + i / 12 * kRows * kColumns;
      const int64_t row = i / 3 % 4 * 2 - 1, column = i % 3 * 2 - 1;
      int64_t best = -1;
      for (int64_t r = std::max<int64_t>(row, 0); r < std::min(row + 3, kRows); ++r)
        for (int64_t c = std::max<int64_t>(column, 0); c < std::min(column + 3, kColumns); ++c)
          if (const double v = image[r * kColumns + c];
              best < 0 || v > image[best] || std::isnan(v))
            best = r * kColumns + c;
      ASSERT_EQ(at.values<int64_t>()[i], best) << i;
      ASSERT_TRUE(y.values<double>()[i] == image[best] || std::isnan(image[best])) << i;
    }
  }
}

TEST(Pool, RefusesByNameAndValue) {
  Tensor x = values({2, 3, 5, 6});
  auto refused = [](auto f, const char* text) { expect_contains(error_of(f), text); };
  refused([&] { max_pool2d(values({3, 4}), 2); }, "max_pool2d: x is f32[3, 4]");
  refused([&] { max_pool2d(x, 0); }, "max_pool2d: kernel [0]");
  refused([&] { max_pool2d(x, {1, 2, 3}); }, "max_pool2d: kernel [1, 2, 3]");
  refused([&] { max_pool2d(x, 2, {.padding = 2}); }, "padding [2, 2] is more than half");
  refused([&] { max_pool2d(x, 7); }, "kernel [7, 7] does not fit into x [2, 3, 5, 6]");
  refused([&] { max_pool2d(cast(x, kI64), 2); }, "expected floats");
  refused([&] { avg_pool2d(x, 2, {.divisor_override = -1}); }, "divisor_override=-1");
  refused([&] { adaptive_avg_pool2d(x, 0); }, "adaptive_avg_pool2d: output [0, 0]");
  refused([&] { interpolate(x, {}); }, "either size or scale_factor");
  refused([&] { interpolate(x, {.scale_factor = {-1}}); }, "scale_factor -1");
}

// A mean far from zero: sums of squares would keep no digit of the variance.
TEST(BatchNorm, VarianceDoesNotCancel) {
  Tensor x = values({4, 20, 30, 31}) + 1000.0;
  BatchMoments got = batch_norm_moments(x, {}, {}, 0),
               want = batch_norm_moments(cast(x, kF64), {}, {}, 0);
  EXPECT_LT(difference(got.mean, want.mean), 1e-4);
  EXPECT_LT(difference(got.var, want.var), 1e-6);
  EXPECT_LT(difference(got.y, want.y), 1e-3);
}

TEST(BatchNorm, BitsDoNotDependOnThreads) {
  Tensor x = values({4, 24, 20, 20});
  auto f = [](const Tensor& t) { return batch_norm_moments(t, {}, {}, 1e-5).y; };
  const int before = num_threads();
  set_num_threads(1);
  Tensors want = both(f, x);
  set_num_threads(3);
  Tensors got = both(f, x);
  set_num_threads(before);
  EXPECT_EQ(difference(got[0], want[0]), 0);
  EXPECT_EQ(difference(got[1], want[1]), 0);
}

TEST(BatchNorm, SixteenBitFloatsTakeWideParameters) {
  Tensor x = values({4, 8, 5, 5}), w = values({8}, kF32, 2), b = values({8}, kF32, 3);
  Tensor mean = zeros({8}), var = ones({8});
  Tensor y = batch_norm(cast(x, kBF16), mean, var, {.weight = w, .bias = b, .training = true});
  EXPECT_EQ(y.dtype(), kBF16);
  EXPECT_GT(difference(mean, zeros({8})), 0);
  Tensor again = batch_norm(x, zeros({8}), ones({8}), {.weight = w, .bias = b, .training = true});
  EXPECT_LT(difference(y, again), 0.03);
}

// Kernels read bf16 as it is; through f32 the result differs by one rounding of it at most. NaN and
// infinities stay what they are.
TEST(BatchNorm, BrainFloatsAreComputedInF32) {
  Tensor x = cast(values({4, 70, 5, 3}), kBF16), z = cast(values({4, 70, 5, 3}, kF32, 4), kBF16);
  auto run = [&](DType t) {
    Tensor a = cast(x, t).requires_grad_(), b = cast(z, t).requires_grad_();
    Tensor y = batch_norm_moments(a, {}, {}, 1e-5, {.residual = b, .relu = true}).y;
    Tensors out{y}, in{a, b}, cot{cast(cast(values(y.shape(), kF32, 7), kBF16), t)};
    Tensors g = grad(out, in, cot);
    return Tensors{y.detach(), g[0], g[1]};
  };
  Tensors narrow = run(kBF16), wide = run(kF32);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(narrow[i].dtype(), kBF16);
    EXPECT_LT(difference(narrow[i], wide[i]), 0.02);
  }
  EXPECT_EQ(difference(narrow[0], cast(wide[0], kBF16)), 0);
  Tensor bad = full({1, 33, 2, 2}, std::numeric_limits<double>::quiet_NaN(), {.dtype = kBF16});
  Tensor y = batch_norm_moments(bad, {}, {}, 1e-5, {.relu = true}).y;
  EXPECT_TRUE(all(ne(y, y)).item<bool>());
}

TEST(GroupNorm, SixteenBitFloatsTakeWideParameters) {
  Tensor x = cast(values({4, 8, 5, 5}), kBF16), w = values({8}, kF32, 2), b = values({8}, kF32, 3);
  Tensor y = group_norm(x, 2, w, b);
  EXPECT_EQ(y.dtype(), kBF16);
  EXPECT_EQ(difference(y, cast(group_norm(cast(x, kF32), 2, w, b), kBF16)), 0);
}

// i * (in / out) falls below the integer it is at 19 of these.
TEST(Interpolate, NearestPlacesAreExactForSizes) {
  for (int64_t in = 1; in < 64; ++in)
    for (int64_t out = 1; out < 64; ++out) {
      std::vector<int64_t> want;
      for (int64_t i = 0; i < out; ++i) want.push_back(i * in / out);
      Tensor y = interpolate(reshape(arange(0, in), {1, 1, in}), {.size = PerDim(out)});
      EXPECT_EQ(difference(y, from_values<int64_t>(want, {1, 1, out})), 0) << in << " to " << out;
    }
}

TEST(Interpolate, NearestPlacesAreExactForWholeFactors) {
  for (int64_t factor = 1; factor < 128; ++factor) {
    std::vector<int64_t> want;
    for (int64_t i = 0; i < 3 * factor; ++i) want.push_back(i / factor);
    Tensor y = interpolate(reshape(arange(0, 3), {1, 1, 3}), {.scale_factor = {double(factor)}});
    EXPECT_EQ(difference(y, from_values<int64_t>(want, {1, 1, 3 * factor})), 0) << factor;
  }
}

TEST(Interpolate, SixteenBitFloatsAreRoundedOnce) {
  Tensor x = cast(values({1, 8, 16, 16}) + 2.0, kBF16);
  const InterpolateOptions o{.size = PerDim(37), .mode = Interpolation::kLinear};
  EXPECT_EQ(difference(interpolate(x, o), cast(interpolate(cast(x, kF32), o), kBF16)), 0);
}

TEST(BatchNorm, OfEvaluationRoundsOnceToo) {
  // x times the weight alone is beyond f16.
  Tensor x = cast(values({2, 8, 3, 3}), kF16) * 300.0,
         z = full({2, 8, 3, 3}, -60000.0, {.dtype = kF16});
  Tensor mean = zeros({8}), var = ones({8}), w = full({8}, 250.0);
  auto run = [&](DType t) {
    return batch_norm(cast(x, t), mean, var, {.weight = w}, {.residual = cast(z, t), .relu = true});
  };
  EXPECT_EQ(difference(run(kF16), cast(run(kF32), kF16)), 0);
  EXPECT_GT(difference(run(kF16), zeros(x.shape())), 5000);
}

TEST(GroupNorm, AndInterpolateTakeAnEmptyBatch) {
  Tensor x = empty({0, 4, 3, 2});
  EXPECT_EQ(group_norm(x, 2).shape(), (Shape{0, 4, 3, 2}));
  EXPECT_EQ(interpolate(x, {.size = {{6, 5}}}).shape(), (Shape{0, 4, 6, 5}));
  expect_contains(error_of([&] {
                    interpolate(empty({2, 4, 0}), {.size = PerDim(6)});
                  }),
                  "spatial extents must be positive");
}

TEST(BatchNorm, RefusesByNameAndValue) {
  Tensor x = values({2, 3, 4}), m = zeros({3}), v = ones({3});
  auto refused = [](auto f, const char* text) { expect_contains(error_of(f), text); };
  refused([&] { batch_norm(values({3}), m, v); }, "batch_norm: x is f32[3]");
  refused([&] { batch_norm(x, zeros({4}), v); }, "running_mean is f32[4]");
  refused([&] { batch_norm(x, m, {}); }, "one of running_mean and running_var");
  refused([&] { batch_norm(x, {}, {}); }, "without training");
  refused([&] { batch_norm(values({1, 3}), m, v, {.training = true}); }, "1 values a channel");
  refused([&] { batch_norm(x, m, v, {.weight = ones({2}), .training = true}); },
          "weight is f32[2]");
  refused([&] { group_norm(x, 2); }, "groups=2");
}

// One spatial dim and three are two with the others of extent 1, or taken one after the other.
TEST(Pool, AdaptiveMaximaOfOneAndThreeDims) {
  Tensor line = values({2, 3, 11}), plane = reshape(line, {2, 3, 1, 11});
  EXPECT_EQ(difference(adaptive_max_pool1d(line, 4),
                       reshape(adaptive_max_pool2d(plane, {1, 4}), {2, 3, 4})),
            0);
  Tensor space = values({2, 3, 5, 6, 7});
  Tensor flat = reshape(adaptive_max_pool2d(reshape(space, {2, 15, 6, 7}), {4, 3}), {2, 3, 5, 12});
  Tensor want = adaptive_max_pool2d(flat, {2, 12});
  EXPECT_EQ(difference(reshape(adaptive_max_pool3d(space, {2, 4, 3}), {2, 3, 2, 12}), want), 0);
}

}  // namespace
}  // namespace tessera
