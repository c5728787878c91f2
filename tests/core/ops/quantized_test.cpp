// Layers of bytes against sums in integers, written out here. Scales are powers of two and biases
// multiples of them where bits are compared, so that the epilogue is exact too.
#include "core/ops/quantized.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/target.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/pool.h"
#include "core/ops/quantized_layer.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using Window = ConvAttributes::Window;

Tensor bytes(const Shape& shape, uint64_t key, int low = 0, int high = 256) {
  return cast(sample_integers(shape, low, high, key), kU8);
}

struct Problem {
  Shape x, w;
  Window window;  // of two spatial dims
};

// sum (x - zx) (w - 128) [N, O, H, W] in i64.
std::vector<int64_t> sums(const Problem& p, const Tensor& x, const Tensor& w, int zx,
                          const Shape& y) {
  const uint8_t *xv = x.values<uint8_t>(), *wv = w.values<uint8_t>();
  const Window& v = p.window;
  const int64_t of_group = p.w[0] / v.groups;
  std::vector<int64_t> out;
  for (int64_t n = 0; n < y[0]; ++n)
    for (int64_t o = 0; o < y[1]; ++o)
      for (int64_t i = 0; i < y[2]; ++i)
        for (int64_t j = 0; j < y[3]; ++j) {
          int64_t sum = 0;
          for (int64_t c = 0; c < p.w[1]; ++c)
            for (int64_t a = 0; a < p.w[2]; ++a)
              for (int64_t b = 0; b < p.w[3]; ++b) {
                const int64_t r = i * v.stride[0] - v.pad_begin[0] + a * v.dilation[0],
                              s = j * v.stride[1] - v.pad_begin[1] + b * v.dilation[1],
                              channel = o / of_group * p.w[1] + c;
                if (r < 0 || s < 0 || r >= p.x[2] || s >= p.x[3]) continue;
                sum += (xv[((n * p.x[1] + channel) * p.x[2] + r) * p.x[3] + s] - zx) *
                       (wv[((o * p.w[1] + c) * p.w[2] + a) * p.w[3] + b] - 128);
              }
          out.push_back(sum);
        }
  return out;
}

double clamped(double v) { return std::min(std::max(v, 0.0), 255.0); }

// Elements in row-major order.
std::vector<double> elements(const Tensor& t) {
  Tensor wide = cast(t, kF64).contiguous();
  const double* v = wide.values<double>();
  return {v, v + wide.numel()};
}

void expect_exact(const Problem& p, int zx, bool residual, bool relu, bool quantized, int zy) {
  const Tensor x = bytes(p.x, 1), w = bytes(p.w, 2);
  const int64_t channels = p.w[0];
  const double unit = 0x1p-7;
  Tensor scale = cast(sample_integers({channels}, 1, 4, 3), kF32) * unit * unit,
         bias = cast(sample_integers({channels}, -2000, 2000, 4), kF32) * scale;
  Shape shape{p.x[0], channels, 0, 0};
  for (int d = 0; d < 2; ++d)
    shape[d + 2] = (p.x[d + 2] + p.window.pad_begin[d] + p.window.pad_end[d] -
                    p.window.dilation[d] * (p.w[d + 2] - 1) - 1) /
                       p.window.stride[d] +
                   1;
  QuantizedEpilogue then{.relu = relu, .quantized = quantized, .y_zero_point = zy};
  if (residual)
    then.residual = bytes(shape, 5), then.residual_scale = 0.5, then.residual_zero_point = 9;
  Tensor got =
      quantized_conv(x.contiguous(MemoryFormat::kChannelsLast), zx, w, scale, bias, p.window, then);
  ASSERT_EQ(got.shape(), shape);
  ASSERT_EQ(got.dtype(), quantized ? kU8 : kF32);
  std::vector<int64_t> sum = sums(p, x, w, zx, shape);
  std::vector<double> s = elements(scale), b = elements(bias), y = elements(got),
                      r = residual ? elements(then.residual) : std::vector<double>(y.size(), 9);
  const int64_t places = shape[2] * shape[3];
  for (size_t i = 0; i < y.size(); ++i) {
    const size_t o = (int64_t(i) / places) % channels;
    double want = double(sum[i]) * s[o] + b[o] + 0.5 * (r[i] - 9);
    if (relu) want = std::max(want, 0.0);
    if (quantized) want = clamped(std::nearbyint(want + zy));
    ASSERT_EQ(y[i], want) << "element " << i;
  }
}

Window window(int64_t stride, int64_t padding, int64_t dilation = 1, int64_t groups = 1) {
  return {{stride, stride}, {dilation, dilation}, {padding, padding}, {padding, padding}, groups};
}

TEST(Quantized, ConvolutionsAreExact) {
  const Problem problems[] = {{{2, 3, 11, 9}, {16, 3, 7, 7}, window(2, 3)},
                              {{2, 64, 5, 6}, {32, 64, 1, 1}, window(1, 0)},
                              {{1, 32, 7, 7}, {64, 32, 3, 3}, window(1, 1)},
                              {{2, 16, 8, 8}, {24, 16, 3, 3}, window(2, 1, 2)},
                              {{2, 8, 6, 6}, {12, 4, 3, 3}, window(1, 1, 1, 2)},
                              {{2, 16, 6, 6}, {16, 1, 3, 3}, window(1, 1, 1, 16)}};
  for (const Problem& p : problems)
    for (int zx : {0, 77}) {
      SCOPED_TRACE(fmt::format("x {} w {} zero point {}", to_string(p.x), to_string(p.w), zx));
      expect_exact(p, zx, false, false, true, 100);
      expect_exact(p, zx, false, true, true, 0);
      expect_exact(p, zx, true, true, true, 0);
      expect_exact(p, zx, true, true, true, 21);
      expect_exact(p, zx, true, false, false, 0);
    }
}

TEST(Quantized, LargestSumsDoNotSaturate) {
  // Pairs of products reach beyond 16 bits, sums nearly to 2^24.
  for (int value : {1, 255}) {
    Tensor x = full({1, 512, 3, 3}, 255).to(kU8), w = full({16, 512, 1, 1}, value).to(kU8);
    Tensor y = quantized_conv(x, 0, w, ones({16}), zeros({16}), window(1, 0), {.quantized = false});
    for (double v : elements(y)) ASSERT_EQ(v, 255.0 * (value - 128) * 512);
  }
}

TEST(Quantized, LinearIsTheConvolutionOfOnePlace) {
  const Tensor x = bytes({5, 7, 48}, 1), w = bytes({20, 48}, 2), scale = full({20}, 0x1p-12),
               bias = cast(sample_integers({20}, -50, 50, 3), kF32) * 0.25,
               residual = bytes({5, 7, 20}, 4);
  for (bool quantized : {true, false})
    for (int zx : {0, 130}) {
      QuantizedEpilogue then{.residual = residual,
                             .residual_scale = 0.25,
                             .residual_zero_point = 3,
                             .quantized = quantized,
                             .y_zero_point = quantized ? 30 : 0};
      Tensor y = quantized_linear(x, zx, w, scale, bias, then);
      then.residual = residual.reshape({35, 20, 1, 1});
      Tensor want = quantized_conv(x.reshape({35, 48, 1, 1}), zx, w.reshape({20, 48, 1, 1}), scale,
                                   bias, window(1, 0), then);
      EXPECT_EQ(elements(y), elements(want));
      // And the decomposition says the same.
      QuantizedEpilogue plain{.quantized = quantized};
      Tensor one = quantized_linear(x, zx, w, scale, bias, plain);
      Tensor f32 = (x.to(kF32) - double(zx)).reshape({35, 48});
      Tensor sum = matmul(f32, transpose(w.to(kF32) - 128.0, 0, 1)) * 0x1p-12 + bias;
      if (quantized) sum = clamp(round(sum), 0.0, 255.0);
      EXPECT_EQ(elements(one), elements(sum));
    }
}

TEST(Quantized, AnyScaleIsWithinOneStep) {
  Tensor x = bytes({2, 32, 9, 9}, 1), w = bytes({16, 32, 3, 3}, 2),
         scale = sample_values({16}, 1e-4, 2e-4, 3).to(kF32),
         bias = sample_values({16}, -20, 20, 4).to(kF32), residual = bytes({2, 16, 9, 9}, 5);
  QuantizedEpilogue then{
      .residual = residual, .residual_scale = 0.731, .relu = true, .y_zero_point = 0};
  std::vector<double> y = elements(quantized_conv(x, 0, w, scale, bias, window(1, 1), then)),
                      s = elements(scale), b = elements(bias), r = elements(residual);
  std::vector<int64_t> sum =
      sums({{2, 32, 9, 9}, {16, 32, 3, 3}, window(1, 1)}, x, w, 0, {2, 16, 9, 9});
  for (size_t i = 0; i < y.size(); ++i) {
    const size_t o = i / 81 % 16;
    const double want = clamped(double(sum[i]) * s[o] + b[o] + 0.731 * r[i]);
    ASSERT_NEAR(y[i], want, 0.501) << i;
  }
}

TEST(Quantized, WeightsAreFoundAnewWhenTheyChange) {
  Tensor x = bytes({1, 8, 4, 4}, 1), w = bytes({8, 8, 1, 1}, 2), scale = full({8}, 0x1p-6),
         bias = zeros({8});
  // One op called again, as an executor does.
  PrimRef prim;
  struct Catch final : Backend {
    PrimRef& prim;
    BackendScope on{{.backend = this}};
    explicit Catch(PrimRef& p) : prim(p) {}
    Tensors run(const PrimRef& p, Inputs in) override {
      prim = p;
      return eager_backend().run(p, in);
    }
    void assign(std::span<const Tensor>, const PrimRef&, Inputs) override {}
  };
  {
    Catch caught(prim);
    quantized_conv(x, 0, w, scale, bias, window(1, 0), {.constant = true});
  }
  auto run = [&](const Tensor& from) {
    return elements(
        dispatch1(prim, operands(Tensor(from), Tensor(w), Tensor(scale), Tensor(bias))));
  };
  const auto& layer = static_cast<const QuantizedLayer&>(*prim);
  std::vector<double> first = run(x);
  auto prepared = layer.prepared();
  ASSERT_TRUE(prepared);
  EXPECT_FALSE(prepared->kernel().empty());
  EXPECT_EQ(run(x), first);
  EXPECT_EQ(layer.prepared(), prepared) << "packed once";
  assign_(w, bytes({8, 8, 1, 1}, 7));
  EXPECT_EQ(run(x), elements(quantized_conv(x, 0, w, scale, bias, window(1, 0), {})));
  EXPECT_NE(run(x), first);
  Tensor larger = bytes({3, 8, 5, 5}, 8);
  EXPECT_EQ(run(larger), elements(quantized_conv(larger, 0, w, scale, bias, window(1, 0), {})));
}

TEST(Quantized, BytesAndBack) {
  const float inf = INFINITY, nan = NAN;
  Tensor x =
      from_values<float>({0, 0.049f, 0.051f, -0.2f, 1e9f, -inf, inf, nan, 0.25f, 0.35f}, {10});
  EXPECT_EQ(elements(quantize(x, {0.1, 10})),
            (std::vector<double>{10, 10, 11, 8, 255, 0, 255, 0, 12, 14}));
  Tensor y = randn({3, 4, 5, 6}), q = quantize(y, {0.05, 128});
  EXPECT_LE(amax(abs(dequantize(q, {0.05, 128}) - y)).item<double>(), 0.0251);
  Tensor last = y.contiguous(MemoryFormat::kChannelsLast), ql = quantize(last, {0.05, 128});
  EXPECT_TRUE(ql.is_contiguous(MemoryFormat::kChannelsLast));
  EXPECT_EQ(elements(ql), elements(q));
}

TEST(Quantized, LargestOfAWindow) {
  Tensor x = bytes({2, 5, 7, 6}, 1);
  const PoolAttributes::Windows w{{4, 3}, {3, 3}, {2, 2}, {1, 1}, {1, 1}};
  EXPECT_EQ(elements(quantized_max_pool(x, w)),
            elements(max_pool2d(x.to(kF32), 3, {.stride = 2, .padding = 1})));
  const PoolAttributes::Windows gaps{{3, 2}, {2, 2}, {2, 2}, {0, 0}, {2, 2}};
  EXPECT_EQ(elements(quantized_max_pool(x, gaps)),
            elements(max_pool2d(x.to(kF32), 2, {.stride = 2, .dilation = 2})));
  // The gap of the second of three windows lies over all of x: refused, as by the pool of floats.
  const Tensor row = bytes({1, 1, 2}, 1);
  for (bool of_bytes : {true, false}) try {
      of_bytes ? quantized_max_pool(row, {{3}, {2}, {1}, {2}, {3}})
               : max_pool1d(row.to(kF32), 2, {.stride = 1, .padding = 2, .dilation = 3});
      ADD_FAILURE() << "no error, bytes " << of_bytes;
    } catch (const ShapeError& e) {
      expect_contains(e.what(), "window 1 of dim 2 is outside of");
    }
}

TEST(Quantized, Refusals) {
  Tensor x = bytes({2, 8}, 1), w = bytes({4, 8}, 2), s = full({4}, 0.5), b = zeros({4});
  EXPECT_NE(error_of([&] { quantized_linear(x.to(kF32), 0, w, s, b, {}); }).find("expected u8"),
            std::string::npos);
  EXPECT_NE(error_of([&] { quantized_linear(x, 256, w, s, b, {}); }).find("zero_point=256"),
            std::string::npos);
  EXPECT_NE(error_of([&] { quantized_linear(x, 0, w, s * 0.0, b, {}); }).find("scale[0] is 0"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              quantized_linear(x, 0, w, zeros({3}), zeros({3}), {});
            }).find("one value for each of the 4 rows"),
            std::string::npos);
  EXPECT_NE(error_of([&] { quantize(s, {0.0, 1}); }).find("scale=0"), std::string::npos);
  EXPECT_NE(error_of([&] { quantize(s, {NAN, 1}); }).find("scale=nan"), std::string::npos);
  Tensor leaf = randn({3}).requires_grad_();
  EXPECT_NE(error_of([&] {
              sum(dequantize(quantize(leaf, {0.1, 128}), {0.1, 128})).backward();
            }).find("has no history"),
            std::string::npos);
  Tensor scale = full({4}, 0.5).requires_grad_();
  EXPECT_THROW(sum(quantized_linear(x, 0, w, scale, b, {.quantized = false})).backward(),
               NotDifferentiable);
}

}  // namespace
}  // namespace tessera
