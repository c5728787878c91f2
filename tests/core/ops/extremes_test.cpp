// Numbers at the ends of what an argument can hold: extents, places and steps whose products leave
// 64 bits are refused by name before memory is touched, and windows beyond the library's 32 bits
// are still computed.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/autograd/autograd.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/conv.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/interpolate.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/pool.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

constexpr int64_t kLargest = INT64_MAX, kBeyond32 = int64_t(1) << 32;

void refuses(const std::function<void()>& f, std::string_view part) {
  const std::string text = error_of(f);
  EXPECT_NE(text.find(part), std::string::npos) << "expected \"" << part << "\", got: " << text;
}
double difference(const Tensor& a, const Tensor& b) {
  return amax(abs(cast(a, kF64) - cast(b, kF64))).item<double>();
}

TEST(Extremes, ViewsStayInsideOfTheirMemory) {
  Tensor x = zeros({5});
  for (int64_t size : {kLargest, kLargest - 1, int64_t(6)})
    refuses([&] { narrow(x, 0, 3, size); }, "narrow: ");
  refuses([&] { narrow(x, 0, kLargest, 1); }, "narrow: 1 elements from 9223372036854775807");
  refuses([&] { narrow(x, 0, 6, 0); }, "narrow: 0 elements from 6 of dim 0 of [5]");
  EXPECT_EQ(narrow(x, 0, 5, 0).numel(), 0);
  EXPECT_EQ(slice(x, 0, 1, kLargest, 3).shape(), Shape({2}));
  EXPECT_EQ(slice(x, 0, 0, kLargest, kLargest).shape(), Shape({1}));
  refuses([&] { unslice(x, 0, kLargest - 2, 1, 6); }, "unslice: ");
  refuses([&] { unslice(x, 0, 0, kLargest / 2, 6); }, "unslice: ");
  refuses([&] { unslice(x, 0, -3, 1, 6); }, "unslice: ");
  refuses([&] { unslice(x, 0, 0, 0, 6); }, "unslice: ");
}

TEST(Extremes, ElementsAreCountedIn64Bits) {
  refuses([] { reshape(zeros({0}), {kBeyond32, kBeyond32}); }, "more elements than 64 bits");
  refuses([] { reshape(zeros({4}), {4, (int64_t(1) << 62) + 1}); }, "more elements than 64 bits");
  refuses([] { reshape(zeros({4}), {kBeyond32, kBeyond32, -1}); }, "more elements than 64 bits");
  refuses([] { unflatten(zeros({4}), 0, {4, (int64_t(1) << 62) + 1}); }, "more elements than 64");
  refuses([] { expand(ones({1}), {int64_t(1) << 40, int64_t(1) << 40}); }, "more elements than 64");
  EXPECT_EQ(reshape(zeros({0}), {kBeyond32, kBeyond32, 0}).numel(), 0);
  refuses([] { pad(zeros({5}), {kLargest, kLargest}); }, "does not fit any memory");
  refuses([] { pad(zeros({5}), {kLargest, 2}); }, "does not fit any memory");
  refuses([] { pad(zeros({5}), {kLargest, 2}, PadMode::kReplicate); }, "this mode takes 0 to");
  for (int64_t cut : {INT64_MIN, int64_t(-6)})
    refuses([&] { pad(zeros({5}), {cut, 3}); }, "cut off more than there is");
  refuses([] { pad(zeros({5}), {-3, -3}); }, "cut off more than there is");
  EXPECT_EQ(pad(zeros({5}), {-3, -2}).numel(), 0);
  refuses([] { repeat(zeros({2}), {kLargest}); }, "repeat: ");
  refuses([] { repeat(zeros({2}), {kLargest / 2}); }, "does not fit any memory");
  refuses([] { repeat_interleave(zeros({2}), kLargest, 0); }, "repeat_interleave: ");
  refuses([] { arange(INT64_MIN, INT64_MAX); }, "arange: ");
}

TEST(Extremes, WindowsBeyond32BitsAreRefusedByName) {
  Tensor x = ones({1, 1, 4}), w = ones({1, 1, 3});
  refuses([&] { conv1d(x, w, {}, {.stride = kBeyond32}); }, "conv1d: stride [4294967296]");
  refuses([&] { conv1d(x, w, {}, {.dilation = kLargest}); }, "conv1d: dilation");
  refuses([&] { conv1d(x, w, {}, {.padding = kLargest / 2}); }, "conv1d: padding");
  refuses([&] { conv_transpose1d(x, w, {}, {.stride = kLargest}); }, "conv_transpose1d: stride");
  refuses([&] { avg_pool1d(x, kLargest, {.stride = 1, .padding = kLargest / 2}); },
          "avg_pool1d: kernel");
  refuses([&] { max_pool1d(x, 3, {.dilation = kLargest}); }, "max_pool1d: dilation");
  refuses([&] { interpolate(x, {.size = PerDim(kLargest)}); }, "interpolate: size");
  refuses([&] { interpolate(x, {.scale_factor = {1e18}}); }, "interpolate: scale_factor");
  refuses([&] { interpolate(x, {.scale_factor = {INFINITY}}); }, "interpolate: scale_factor");
  Tensor cube = ones({1, 1, 2, 2, 2});
  refuses([&] { interpolate(cube, {.size = PerDim(INT32_MAX)}); }, "does not fit any memory");
  // Within these limits the result is the same by every kernel.
  for (DType t : {kF32, kBF16, kF16, kF64})
    EXPECT_EQ(conv1d(x.to(t), w.to(t), {}, {.stride = INT32_MAX, .padding = 1}).item<float>(), 2);
}

// The library takes no convolution that leaves a whole step of x unread.
TEST(Extremes, OutputPaddingOfAStep) {
  for (int64_t stride : {1, 2}) {
    const ConvTransposeOptions o{.stride = stride, .output_padding = stride, .dilation = 3};
    Tensor x = sample_values({2, 2, 5, 4}, -1, 1, 1), w = sample_values({2, 3, 3, 2}, -1, 1, 2);
    const Tensor want = conv_transpose2d(x, w, {}, o);
    for (DType t : {kF32, kBF16, kF16}) {
      const Tensor got = conv_transpose2d(x.to(t), w.to(t), {}, o);
      const Tensor near = conv_transpose2d(x.to(t).to(kF64), w.to(t).to(kF64), {}, o);
      EXPECT_EQ(got.shape(), want.shape());
      const double step = t == kF32 ? 0x1p-22 : t == kF16 ? 0x1p-10 : 0x1p-7;
      EXPECT_LT(difference(got, near), step * amax(abs(near)).item<double>()) << name_of(t);
    }
    Tensor a = x.to(kF32).requires_grad_(), b = w.to(kF32).requires_grad_();
    sum(conv_transpose2d(a, b, {}, o)).backward();
    Tensor c = x.clone().requires_grad_(), d = w.clone().requires_grad_();
    sum(conv_transpose2d(c, d, {}, o)).backward();
    EXPECT_LT(difference(a.grad(), c.grad()), 1e-5);
    EXPECT_LT(difference(b.grad(), d.grad()), 1e-5);
  }
}

TEST(Extremes, NumbersThatADtypeDoesNotHoldAreRefused) {
  const Tensor bytes = zeros({2}, {.dtype = kU8}), set = ones({2}, {.dtype = kBool});
  refuses([] { full({1}, 300, {.dtype = kU8}); }, "full: u8 holds no 300");
  refuses([] { full({1}, int64_t(1) << 40, {.dtype = kI32}); }, "full: i32 holds no 1099511627776");
  for (double v : {1e30, 0x1p63, double(NAN), double(INFINITY)})
    refuses([&] { full({1}, v, {.dtype = kI64}); }, "full: i64 holds no");
  refuses([&] { masked_fill(bytes, set, 300); }, "masked_fill: u8 holds no 300");
  refuses([&] { fill_(bytes, -256); }, "fill_: u8 holds no -256");
  EXPECT_EQ(full({1}, -1, {.dtype = kU8}).item<int64_t>(), 255);
  EXPECT_EQ(full({1}, 2.7, {.dtype = kI64}).item<int64_t>(), 2);
  EXPECT_EQ(full({1}, 300, {.dtype = kBool}).item<bool>(), true);
  refuses([] { full({1}, uint64_t(1) << 63, {.dtype = kF64}); }, "scalar: 9223372036854775808");
  EXPECT_EQ(full({1}, uint64_t(INT64_MAX)).item<int64_t>(), INT64_MAX);
  for (auto [t, high] : {std::pair(kU8, 257), {kBool, 3}, {kBF16, 258}, {kF16, 2050}})
    refuses([&] { randint(0, high, {4}, {.dtype = t}); }, "randint: ");
  refuses([] { randint(-1, 5, {4}, {.dtype = kU8}); }, "its integers are 0 to 255");
  EXPECT_LE(amax(randint(0, 257, {400}, {.dtype = kBF16})).item<float>(), 256);
  EXPECT_EQ(randint(INT32_MIN, int64_t(INT32_MAX) + 1, {4}, {.dtype = kI32}).numel(), 4);
}

TEST(Extremes, RangesHaveAnEnd) {
  refuses([] { arange(5, 0); }, "lead away from the end");
  refuses([] { arange(0.0, 1.0, -0.5); }, "lead away from the end");
  for (double v : {double(NAN), double(INFINITY), -double(INFINITY)}) {
    refuses([&] { arange(0.0, v); }, "expected finite numbers");
    refuses([&] { arange(0.0, 1.0, v); }, "expected finite numbers");
  }
  refuses([] { arange(0, 5, 0); }, "a step that is not 0");
  refuses([] { arange(0.0, 1e300); }, "does not fit any memory");
  EXPECT_EQ(arange(5, 5).numel(), 0);
  EXPECT_EQ(linspace(0, 1, 0).numel(), 0);
  EXPECT_EQ(chunk(zeros({0}), 3).size(), 3u);
}

TEST(Extremes, IntegersHaveNoNegativePowersAndAllTheirBitsShiftOut) {
  const Tensor x = from_values<int64_t>({2, 5, -7}, {3});
  refuses([&] { pow(x, -1); }, "pow: i64[3] cpu to the power -1");
  EXPECT_EQ(pow(x, 2)[2].item<int64_t>(), 49);
  EXPECT_EQ(pow(x, -1.0)[0].item<float>(), 0.5F);
  const Tensor by = from_values<int64_t>({64, -1, 63}, {3});
  const Tensor left = bitwise_left_shift(x, by), right = bitwise_right_shift(x, by);
  EXPECT_TRUE(equal(left, from_values<int64_t>({0, 0, INT64_MIN}, {3})));
  EXPECT_TRUE(equal(right, from_values<int64_t>({0, 0, -1}, {3})));
  const Tensor narrow_by = from_values<int32_t>({40, 31, -1}, {3});
  EXPECT_TRUE(equal(bitwise_left_shift(x.to(kI32), narrow_by),
                    from_values<int32_t>({0, INT32_MIN, 0}, {3})));
  EXPECT_TRUE(
      equal(bitwise_right_shift(x.to(kI32), narrow_by), from_values<int32_t>({0, 0, -1}, {3})));
  const Tensor bytes = from_values<uint8_t>({200, 5, 7}, {3}),
               byte_by = from_values<uint8_t>({8, 7, 255}, {3});
  EXPECT_TRUE(equal(bitwise_left_shift(bytes, byte_by), from_values<uint8_t>({0, 128, 0}, {3})));
  EXPECT_TRUE(equal(bitwise_right_shift(bytes, byte_by), from_values<uint8_t>({0, 0, 0}, {3})));
}

TEST(Extremes, ArgumentsOutOfRangeAreNamed) {
  const Tensor x = ones({2, 3}), classes = from_values<int64_t>({0, 5}, {2});
  refuses([&] { cross_entropy(x, zeros({2}, {.dtype = kI64}), {.label_smoothing = 2}); },
          "label_smoothing 2");
  for (int64_t row : {3, -2})
    refuses(
        [&] {
          embedding(zeros({1}, {.dtype = kI64}), ones({3, 2}), row);
        },
        "embedding: padding_idx");
  refuses([&] { flip(x, {0, -2}); }, "flip: dim 0 is named twice");
  refuses([&] { one_hot(classes, 3); }, "one_hot: class 5 of i64[2] cpu; there are 3 classes");
  refuses([&] { conv_transpose1d(ones({1, 3, 4}), ones({2, 1, 2})); }, "conv_transpose1d: x [1, 3");
}

TEST(Extremes, WholeAndEmptyAreTaken) {
  EXPECT_EQ(sum(dropout(ones({5}), 1)).item<float>(), 0);
  EXPECT_EQ(max_pool1d(ones({2, 1, 1}), 3, {.ceil_mode = true}).shape(), Shape({2, 1, 1}));
  EXPECT_EQ(avg_pool1d(ones({2, 1, 1}), 3, {.ceil_mode = true})[0].item<float>(), 1);
  assign_(expand(zeros({1, 0}), {3, 0}), zeros({3, 0}));
}

}  // namespace
}  // namespace tessera
