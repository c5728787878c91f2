// batch_norm.cu and conv.cu against plain loops in double.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "core/backend/cuda/kernels/scan.h"
#include "core/backend/cuda/kernels/walk.h"
#include "tests/cuda/kernels_device.h"

namespace tessera::cuda::test {
namespace {

class BatchNorm : public KernelTest {};
class Convolution : public KernelTest {};

std::vector<float> numbers(size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> x(n);
  for (float& v : x) v = float(int(random() % 2001) - 800) * 1e-3f;
  return x;
}

TEST_F(BatchNorm, ForwardAndBackwardWithResidualAndRelu) {
  const KernelText text{"batch_norm", {batch_norm_instance(kF32)}};
  const size_t rows = 600, channels = 35, size = rows * channels;
  const auto x = numbers(size, 1), g = numbers(size, 2), residual = numbers(size, 3);
  const auto w = numbers(channels, 4), b = numbers(channels, 5);
  const BatchNormPieces p = batch_norm_pieces(rows, channels);
  ASSERT_GT(p.pieces, 1u);
  Array<float> dx(x), dg(g), dr(residual), dw(w), db(b), y(size), grad(size), gr(size);
  Array<float> first{p.pieces * channels}, second{p.pieces * channels};
  Array<float> mean{channels}, var{channels}, sum_g{channels}, product{channels}, gw{channels},
      gb{channels};
  BatchNormCall c{};
  c.x = dx.get(), c.weight = dw.get(), c.bias = db.get(), c.residual = dr.get(), c.out = y.get();
  c.mean = mean.get(), c.var = var.get(), c.first = first.get(), c.second = second.get();
  c.eps = 1e-5, c.share = 1 / double(rows), c.rows = rows, c.channels = channels;
  c.piece = p.piece, c.pieces = p.pieces, c.relu = 1;
  auto run = [&](const char* entry, const Geometry& geometry) {
    d().launch(d().function(text, std::string("batch_norm_f32_") + entry), geometry, c);
  };
  run("moments", p.geometry), run("join_moments", cover(channels, 256)),
      run("normalize", p.geometry);
  const auto got = y.read();
  c.g = dg.get(), c.y = y.get(), c.out = grad.get(), c.dresidual = gr.get(), c.sum_g = sum_g.get();
  c.sum_product = product.get(), c.dw = gw.get(), c.db = gb.get();
  run("grad_sums", p.geometry), run("join_sums", cover(channels, 256)), run("grad", p.geometry);
  const auto got_grad = grad.read(), got_residual = gr.read(), got_w = gw.read(), got_b = gb.read();
  for (size_t k = 0; k < channels; ++k) {
    double mu = 0, v = 0, sg = 0, sh = 0;
    for (size_t r = 0; r < rows; ++r) mu += x[r * channels + k] / double(rows);
    for (size_t r = 0; r < rows; ++r) v += std::pow(x[r * channels + k] - mu, 2) / double(rows);
    const double rstd = 1 / std::sqrt(v + 1e-5);
    auto cot = [&](size_t i) { return got[i] > 0 ? double(g[i]) : 0.0; };
    for (size_t r = 0; r < rows; ++r) {
      const size_t i = r * channels + k;
      const double h = (x[i] - mu) * rstd;
      ASSERT_NEAR(got[i], std::max(0.0, h * w[k] + b[k] + residual[i]), 1e-5);
      sg += cot(i), sh += cot(i) * h;
    }
    ASSERT_NEAR(got_w[k], sh, 1e-4);
    ASSERT_NEAR(got_b[k], sg, 1e-4);
    for (size_t r = 0; r < rows; ++r) {
      const size_t i = r * channels + k;
      const double h = (x[i] - mu) * rstd;
      ASSERT_NEAR(got_grad[i], w[k] * rstd * (cot(i) - sg / rows - h * sh / rows), 2e-5);
      ASSERT_EQ(got_residual[i], float(cot(i)));
    }
  }
  // The same sums of a gradient that another is added to, masked where it lies.
  c.residual = dr.get(), c.dresidual = dg.get();
  run("masked_sums", p.geometry), run("join_sums", cover(channels, 256));
  const auto masked = dg.read(), masked_w = gw.read(), masked_b = gb.read();
  for (size_t k = 0; k < channels; ++k) {
    double mu = 0, v = 0, sg = 0, sh = 0;
    for (size_t r = 0; r < rows; ++r) mu += x[r * channels + k] / double(rows);
    for (size_t r = 0; r < rows; ++r) v += std::pow(x[r * channels + k] - mu, 2) / double(rows);
    for (size_t r = 0; r < rows; ++r) {
      const size_t i = r * channels + k;
      ASSERT_EQ(masked[i], got[i] > 0 ? g[i] + residual[i] : 0.0f);
      sg += masked[i], sh += masked[i] * (x[i] - mu) / std::sqrt(v + 1e-5);
    }
    ASSERT_NEAR(masked_w[k], sh, 1e-4);
    ASSERT_NEAR(masked_b[k], sg, 1e-4);
  }
}

// Two images of 2 groups of 3 channels, 6 x 5; kernels 3 x 2, stride 2 x 1, padding 1 x 0.
TEST_F(Convolution, ColumnsAndTheirTranspose) {
  const KernelText text{"conv", {conv_instance(kF32)}};
  ConvCall c{};
  c.dim[0] = {1, 1, 1, 1, 0, 1}, c.dim[1] = {6, 3, 3, 2, 1, 1}, c.dim[2] = {5, 3, 2, 1, 0, 2};
  c.x = {180, 30, {0, 5, 1}};
  c.groups = 2, c.channels = 3, c.rows = 2 * 9, c.columns = 18;
  c.count = c.groups * c.rows * c.columns;
  const auto x = numbers(360, 1), g = numbers(c.count, 2);
  Array<float> in(x), columns{c.count}, cotangent(g), dx(360);
  c.in = in.get(), c.out = columns.get();
  d().launch(d().function(text, "conv_f32_gather"), cover(c.count, 256), c);
  const auto got = columns.read();
  std::vector<double> expected(360, 0.0);
  for (size_t e = 0; e < c.count; ++e) {
    const int64_t q = int64_t(e % 18), row = int64_t(e / 18 % 18), group = int64_t(e / 324);
    const int64_t i = row % 9 / 3 * 2 - 1 + q / 6, j = row % 3 + q / 3 % 2 * 2;
    const int64_t at = row / 9 * 180 + (group * 3 + q % 3) * 30 + i * 5 + j;
    const bool inside = i >= 0 && i < 6 && j < 5;
    ASSERT_EQ(got[e], inside ? x[size_t(at)] : 0.0f) << e;
    if (inside) expected[size_t(at)] += g[e];
  }
  c.in = cotangent.get(), c.out = dx.get(), c.count = 360;
  d().launch(d().function(text, "conv_f32_collect"), cover(360, 256), c);
  const auto grad = dx.read();
  for (size_t i = 0; i < 360; ++i) ASSERT_NEAR(grad[i], expected[i], 1e-5) << i;
}

}  // namespace
}  // namespace tessera::cuda::test
