// reduce.cu, extreme.cu, rows.cu and losses.cu against plain loops in double.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "core/backend/cuda/kernels/reduce.h"
#include "core/backend/cuda/kernels/rows.h"
#include "core/backend/cuda/refusals.h"
#include "tests/cuda/kernels_device.h"
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/convert.h"
// clang-format on

namespace tessera::cuda::test {
namespace {

class KernelTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!Device::get()) GTEST_SKIP() << Device::why();
  }
  Device& d() { return *Device::get(); }
};
class Reduce : public KernelTest {};
class Rows : public KernelTest {};

template <class T>
std::vector<T> numbers(size_t n, unsigned seed, double low = -1, double high = 1) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> draw(low, high);
  std::vector<T> x(n);
  for (T& v : x) v = T(draw(random));
  return x;
}

// Runs all launches of a reduction; the text has the instances in -> compute, compute -> out, in ->
// out.
template <class In, class C, class Out>
std::vector<Out> reduced(const std::string& join, DType in, DType compute, DType out,
                         const std::vector<In>& x, int64_t outer, int64_t n, int64_t inner) {
  Device& d = *Device::get();
  KernelText text{"reduce", {reduce_instance(join, in, compute)}};
  auto add = [&](DType from, DType to) {
    for (const Instance& i : text.instances)
      if (i.name == reduce_instance(join, from, to).name) return;
    text.instances.push_back(reduce_instance(join, from, to));
  };
  add(in, out), add(compute, out), add(compute, compute);
  Array<In> from(x);
  Array<Out> to(size_t(outer * inner));
  std::vector<std::unique_ptr<Array<C>>> partial;
  const auto launches = reduce_launches(outer, n, inner, in, compute, true);
  const void* read = from.get();
  for (size_t i = 0; i < launches.size(); ++i) {
    ReduceCall call = launches[i].call;
    const bool last = i + 1 == launches.size();
    call.in = read;
    if (!last) partial.push_back(std::make_unique<Array<C>>(size_t(launches[i].partial)));
    call.out = last ? static_cast<void*>(to.get()) : partial.back()->get();
    read = call.out;
    const std::string name = reduce_instance(join, i ? compute : in, last ? out : compute).name;
    d.launch(d.function(text, name + "_" + launches[i].entry), launches[i].geometry, call);
  }
  return to.read();
}

TEST_F(Reduce, SumsOfRowsAndColumns) {
  struct Case {
    int64_t outer, n, inner;
  };
  for (const Case& c : {Case{5, 7, 1}, Case{3, 1000, 1}, Case{2, 5000, 1}, Case{1, 40000, 1},
                        Case{1, 700, 40}, Case{3, 9, 33}, Case{2, 0, 3}, Case{4, 1, 1}}) {
    const auto x = numbers<float>(size_t(c.outer * c.n * c.inner), 3);
    const auto got =
        reduced<float, float, float>("sum", kF32, kF32, kF32, x, c.outer, c.n, c.inner);
    const auto again =
        reduced<float, float, float>("sum", kF32, kF32, kF32, x, c.outer, c.n, c.inner);
    for (int64_t o = 0; o < c.outer; ++o)
      for (int64_t i = 0; i < c.inner; ++i) {
        double sum = 0, size = 0;
        for (int64_t k = 0; k < c.n; ++k) {
          const double v = x[size_t((o * c.n + k) * c.inner + i)];
          sum += v, size += std::abs(v);
        }
        const size_t at = size_t(o * c.inner + i);
        ASSERT_NEAR(got[at], sum, 1e-6 * size + 1e-30) << c.outer << ' ' << c.n << ' ' << c.inner;
        ASSERT_EQ(got[at], again[at]);
      }
  }
}

TEST_F(Reduce, OtherJoinsAndNarrowTypes) {
  auto x = numbers<float>(3 * 300, 9);
  x[310] = std::numeric_limits<float>::quiet_NaN();
  const auto most = reduced<float, float, float>("amax", kF32, kF32, kF32, x, 3, 300, 1);
  EXPECT_EQ(most[0], *std::max_element(x.begin(), x.begin() + 300));
  EXPECT_TRUE(std::isnan(most[1]));
  std::vector<fn::BF16> narrow(x.size());
  double sum = 0;
  for (size_t i = 0; i < 300; ++i) narrow[i] = fn::to_bf16(x[i]), sum += fn::widen(narrow[i]);
  const auto sums =
      reduced<fn::BF16, float, fn::BF16>("sum", kBF16, kF32, kBF16, narrow, 3, 300, 1);
  EXPECT_NEAR(fn::widen(sums[0]), sum, std::abs(sum) / 128);
  std::vector<uint8_t> bits(2 * 50 * 3, 0);
  bits[size_t(0 * 150 + 20 * 3 + 1)] = 1;
  const auto any = reduced<uint8_t, long, uint8_t>("any", kBool, kI64, kBool, bits, 2, 50, 3);
  EXPECT_EQ(any, (std::vector<uint8_t>{0, 1, 0, 0, 0, 0}));
  const auto counts = reduced<uint8_t, long, long>("sum", kBool, kI64, kI64, bits, 2, 50, 3);
  EXPECT_EQ(counts, (std::vector<long>{0, 1, 0, 0, 0, 0}));
}

TEST_F(Reduce, PositionsOfExtremes) {
  auto x = numbers<float>(2 * 600 * 3, 5);
  auto at = [&](int o, int k, int i) -> float& { return x[size_t((o * 600 + k) * 3 + i)]; };
  at(0, 400, 0) = 5, at(0, 17, 0) = 5, at(0, 599, 1) = 9;
  at(1, 300, 2) = std::numeric_limits<float>::quiet_NaN(), at(1, 500, 2) = at(1, 300, 2);
  const KernelText text{"extreme", {extreme_instance(true, kF32)}};
  Array<float> in(x);
  Array<long> out(6);
  ReduceLaunch l = extreme_launch(2, 600, 3);
  l.call.in = in.get(), l.call.out = out.get();
  d().launch(d().function(text, "argmax_f32_positions"), l.geometry, l.call);
  const auto got = out.read();
  EXPECT_EQ(got[0], 17);
  EXPECT_EQ(got[1], 599);
  EXPECT_EQ(got[5], 300);
}

TEST_F(Rows, SoftmaxAndItsGradient) {
  for (const int64_t n : {5, 100, 700, 1500, 9000}) {
    const int64_t rows = n > 1024 ? 2 : 9;
    const RowHold hold = hold_of(kF32, n);
    const KernelText text{"rows", {rows_instance(kF32, hold)}};
    const auto x = numbers<float>(size_t(rows * n), 2, -4, 4),
               g = numbers<float>(size_t(rows * n), 7);
    Array<float> dx(x), dg(g), y(x.size()), z(x.size());
    for (const bool log : {false, true}) {
      const std::string name = text.instances[0].name + (log ? "_log_softmax" : "_softmax");
      RowsCall c{};
      c.in = dx.get(), c.out = y.get(), c.rows = unsigned(rows), c.n = unsigned(n);
      c.packs = rows_in_packs(kF32, hold, n);
      d().launch(d().function(text, name), rows_geometry(hold, rows), c);
      c.in = y.get(), c.other = dg.get(), c.out = z.get();
      d().launch(d().function(text, name + "_grad"), rows_geometry(hold, rows), c);
      const auto got = y.read(), grad = z.read();
      for (int64_t r = 0; r < rows; ++r) {
        const float *row = &x[size_t(r * n)], *gr = &g[size_t(r * n)];
        double total = 0, dot = 0, gsum = 0;
        for (int64_t k = 0; k < n; ++k) total += std::exp(double(row[k])), gsum += gr[k];
        for (int64_t k = 0; k < n; ++k) dot += std::exp(double(row[k])) / total * gr[k];
        for (int64_t k = 0; k < n; ++k) {
          const double p = std::exp(double(row[k])) / total;
          const size_t i = size_t(r * n + k);
          ASSERT_NEAR(got[i], log ? std::log(p) : p, 2e-6 * (log ? 10 : 1)) << n;
          ASSERT_NEAR(grad[i], log ? gr[k] - p * gsum : p * (gr[k] - dot), 2e-5) << n;
        }
      }
    }
  }
}

TEST_F(Rows, NormsAndTheirGradients) {
  for (const int64_t n : {24, 300, 8200}) {
    const int64_t rows = n > 1024 ? 3 : 70;
    const RowHold hold = hold_of(kF32, n);
    const KernelText text{"rows", {rows_instance(kF32, hold)}};
    const auto x = numbers<float>(size_t(rows * n), 2, -1, 3),
               g = numbers<float>(size_t(rows * n), 7);
    const auto w = numbers<float>(size_t(n), 4), b = numbers<float>(size_t(n), 5);
    for (const bool centred : {true, false}) {
      Array<float> dx(x), dg(g), dw(w), db(b), y(x.size()), z(x.size()), mean{size_t(rows)},
          rstd{size_t(rows)};
      const std::string name = text.instances[0].name + (centred ? "_layer_norm" : "_rms_norm");
      RowsCall c{};
      c.in = dx.get(), c.out = y.get(), c.rows = unsigned(rows), c.n = unsigned(n), c.eps = 1e-5;
      c.packs = rows_in_packs(kF32, hold, n), c.weight = dw.get(), c.bias = db.get();
      c.mean = centred ? mean.get() : nullptr, c.rstd = rstd.get();
      d().launch(d().function(text, name), rows_geometry(hold, rows), c);
      c.out = z.get(), c.other = dg.get();
      d().launch(d().function(text, name + "_grad"), rows_geometry(hold, rows), c);
      const NormSums sums = norm_sums(rows, n);
      Array<float> pw(sums.pieces * size_t(n)), pb(sums.pieces * size_t(n));
      c.piece = sums.piece, c.pieces = sums.pieces, c.dw = pw.get(), c.db = pb.get();
      d().launch(d().function(text, text.instances[0].name + "_norm_sums"), sums.geometry, c);
      const auto got = y.read(), grad = z.read(), gw = pw.read(), gb = pb.read();
      std::vector<double> sw(size_t(n), 0.0), sb(size_t(n), 0.0);
      for (int64_t r = 0; r < rows; ++r) {
        const float *xr = &x[size_t(r * n)], *gr = &g[size_t(r * n)];
        double mu = 0, var = 0, mq = 0, mqh = 0;
        for (int64_t k = 0; k < n; ++k) mu += centred ? xr[k] / double(n) : 0;
        for (int64_t k = 0; k < n; ++k) var += (xr[k] - mu) * (xr[k] - mu) / double(n);
        const double s = 1 / std::sqrt(var + 1e-5);
        for (int64_t k = 0; k < n; ++k) {
          const double h = (xr[k] - mu) * s, q = double(gr[k]) * w[size_t(k)];
          mq += centred ? q / double(n) : 0, mqh += q * h / double(n);
          sw[size_t(k)] += gr[k] * h, sb[size_t(k)] += gr[k];
        }
        for (int64_t k = 0; k < n; ++k) {
          const double h = (xr[k] - mu) * s, q = double(gr[k]) * w[size_t(k)];
          ASSERT_NEAR(got[size_t(r * n + k)], h * w[size_t(k)] + b[size_t(k)], 1e-5) << n;
          ASSERT_NEAR(grad[size_t(r * n + k)], s * (q - mq - h * mqh), 2e-5) << n;
        }
      }
      for (int64_t k = 0; k < n; ++k) {
        double tw = 0, tb = 0;
        for (unsigned p = 0; p < sums.pieces; ++p)
          tw += gw[p * size_t(n) + size_t(k)], tb += gb[p * size_t(n) + size_t(k)];
        ASSERT_NEAR(tw, sw[size_t(k)], 1e-4);
        ASSERT_NEAR(tb, sb[size_t(k)], 1e-4);
      }
    }
  }
}

TEST_F(Rows, CrossEntropyAndItsGradient) {
  for (const int64_t n : {10, 3000}) {
    const int64_t rows = 21, ignored = -100;
    const RowHold hold = hold_of(kF32, n);
    const KernelText text{"losses", {loss_instance(kF32, hold)}};
    const auto x = numbers<float>(size_t(rows * n), 2, -3, 3);
    std::vector<long> targets(static_cast<size_t>(rows));
    for (size_t r = 0; r < targets.size(); ++r) targets[r] = long(r * 7) % n;
    targets[3] = ignored;
    Array<float> in(x), terms{size_t(rows)}, scale(1), loss(1), grad(x.size());
    Array<long> dt(targets);
    Array<Report> report(1);
    report.fill(0);
    LossCall c{in.get(),
               dt.get(),
               terms.get(),
               scale.get(),
               grad.get(),
               loss.get(),
               report.get(),
               ignored,
               unsigned(rows),
               unsigned(n),
               rows_in_packs(kF32, hold, n),
               1};
    const std::string name = text.instances[0].name;
    auto run = [&] {
      d().launch(d().function(text, name + "_count"), {{1, 1, 1}, {256, 1, 1}, 0}, c);
      d().launch(d().function(text, name + "_rows"), rows_geometry(hold, rows), c);
      d().launch(d().function(text, name + "_finish"), {{1, 1, 1}, {256, 1, 1}, 0}, c);
    };
    run();
    const auto got = grad.read();
    double expected = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = &x[size_t(r * n)];
      const long t = targets[size_t(r)];
      double total = 0;
      for (int64_t k = 0; k < n; ++k) total += std::exp(double(row[k]));
      if (t != ignored) expected += (std::log(total) - row[t]) / double(rows - 1);
      for (int64_t k = 0; k < n; ++k) {
        const double slope = (std::exp(double(row[k])) / total - (k == t)) / double(rows - 1);
        ASSERT_NEAR(got[size_t(r * n + k)], t == ignored ? 0 : slope, 1e-6);
      }
    }
    EXPECT_NEAR(loss.read()[0], expected, 1e-5 * expected);
    EXPECT_EQ(report.read()[0], 0u);
    targets[5] = n, targets[9] = -1;
    dt.write(targets);
    run();
    EXPECT_EQ(refused_of(report.read()[0]).position, 5);
  }
}

}  // namespace
}  // namespace tessera::cuda::test
