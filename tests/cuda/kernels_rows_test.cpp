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

// A number from the bits of an element, and back.
float wide(float x) { return x; }
double wide(double x) { return x; }
template <class T>
float wide(T x) {
  return fn::widen(x);
}
template <class T>
T narrow(double x) {
  if constexpr (std::is_same_v<T, fn::BF16>)
    return fn::to_bf16(float(x));
  else if constexpr (std::is_same_v<T, fn::F16>)
    return fn::to_f16(float(x));
  else
    return T(x);
}
template <class T>
constexpr DType kDType = std::is_same_v<T, fn::BF16>  ? kBF16
                         : std::is_same_v<T, fn::F16> ? kF16
                         : std::is_same_v<T, double>  ? kF64
                                                      : kF32;
// What rounding to T may leave between two results, relative to them.
template <class T>
constexpr double kRounding = std::is_same_v<T, fn::BF16>  ? 1.0 / 256
                             : std::is_same_v<T, fn::F16> ? 1.0 / 2048
                                                          : 0;
template <class T>
std::vector<T> elements(size_t n, unsigned seed, double low = -1, double high = 1) {
  std::vector<T> x;
  for (double v : numbers<double>(n, seed, low, high)) x.push_back(narrow<T>(v));
  return x;
}
template <class T>
bool near(T got, double expected, double error) {
  return std::abs(wide(got) - expected) <= error + kRounding<T> * std::abs(expected);
}

template <class T>
void check_softmax(int64_t rows, int64_t n) {
  Device& d = *Device::get();
  constexpr DType t = kDType<T>;
  const RowHold hold = hold_of(row_holds(t), n);
  const KernelText text{"rows", {rows_instance(t, hold)}};
  auto x = elements<T>(size_t(rows * n), 2, -4, 4);
  const auto g = elements<T>(size_t(rows * n), 7);
  x[size_t(n - 1)] = narrow<T>(-std::numeric_limits<double>::infinity());
  Array<T> dx(x), dg(g), y(x.size()), z(x.size());
  for (const bool log : {false, true}) {
    const std::string name = text.instances[0].name + (log ? "_log_softmax" : "_softmax");
    RowsCall c{};
    c.in = dx.get(), c.out = y.get(), c.rows = unsigned(rows), c.n = unsigned(n);
    c.packs = rows_in_packs(t, hold, n);
    d.launch(d.function(text, name), rows_geometry(hold, rows), c);
    c.in = y.get(), c.other = dg.get(), c.out = z.get();
    d.launch(d.function(text, name + "_grad"), rows_geometry(hold, rows), c);
    const auto got = y.read(), grad = z.read();
    for (int64_t r = 0; r < rows; ++r) {
      const T *row = &x[size_t(r * n)], *gr = &g[size_t(r * n)], *yr = &got[size_t(r * n)];
      double total = 0, dot = 0, gsum = 0;
      for (int64_t k = 0; k < n; ++k) total += std::exp(double(wide(row[k]))), gsum += wide(gr[k]);
      for (int64_t k = 0; k < n; ++k) dot += double(wide(yr[k])) * wide(gr[k]);
      for (int64_t k = 0; k < n; ++k) {
        const double p = std::exp(double(wide(row[k]))) / total, q = wide(yr[k]), s = wide(gr[k]);
        const size_t i = size_t(r * n + k);
        const double expected = log ? s - std::exp(q) * gsum : q * (s - dot);
        if (p == 0) {
          ASSERT_EQ(wide(got[i]), log ? -std::numeric_limits<float>::infinity() : 0);
        } else {
          ASSERT_TRUE(near(got[i], log ? std::log(p) : p, 2e-6 * (log ? 10 : 1)))
              << n << ' ' << r << ' ' << k << ' ' << wide(got[i]);
        }
        ASSERT_TRUE(near(grad[i], expected, 2e-5)) << n << ' ' << r << ' ' << k << ' ' << log;
      }
    }
  }
}
TEST_F(Rows, SoftmaxAndItsGradient) {
  for (const int64_t n : {5, 100, 700, 1500, 5000, 9000}) check_softmax<float>(n > 1024 ? 2 : 9, n);
  // Rows of half a warp, some of which are not there; packs; a half-used last pack.
  for (const int64_t n : {5, 120, 128, 250, 256, 1000, 4096, 4100, 9000})
    check_softmax<fn::BF16>(n > 1024 ? 2 : n == 128 ? 19 : 5, n);
  for (const int64_t n : {64, 600}) check_softmax<fn::F16>(3, n);
  for (const int64_t n : {100, 500, 2000, 4000, 5000}) check_softmax<double>(2, n);
}
// The exponentials of a row, to the last that are not 0: of f32 without branches, of 16-bit floats
// by the card's instruction.
template <class T>
void check_small_shares(double rounding) {
  constexpr DType t = kDType<T>;
  const int64_t n = 208;
  std::vector<T> x;
  double total = 0;
  for (int64_t k = 0; k < n; ++k) x.push_back(narrow<T>(-0.5 * double(k)));
  for (const T& v : x) total += std::exp(double(wide(v)));
  const RowHold hold = hold_of(row_holds(t), n);
  const KernelText text{"rows", {rows_instance(t, hold)}};
  Array<T> in(x), out(x.size());
  RowsCall c{};
  c.in = in.get(), c.out = out.get(), c.rows = 1, c.n = unsigned(n);
  c.packs = rows_in_packs(t, hold, n);
  Device& d = *Device::get();
  d.launch(d.function(text, text.instances[0].name + "_softmax"), rows_geometry(hold, 1), c);
  const auto got = out.read();
  for (int64_t k = 0; k < n; ++k) {
    const double p = std::exp(double(wide(x[size_t(k)]))) / total;
    if (p > 0x1p-125)
      ASSERT_NEAR(wide(got[size_t(k)]) / p, 1, rounding) << k;
    else
      ASSERT_LE(wide(got[size_t(k)]), 0x1p-124) << k;
  }
}
TEST_F(Rows, SoftmaxKeepsSmallShares) {
  check_small_shares<float>(4e-7);
  check_small_shares<fn::BF16>(1.0 / 250);
}
TEST_F(Rows, SoftmaxOfNanIsNanInItsRowAlone) {
  for (const int64_t n : {64, 3000}) {
    const RowHold hold = hold_of(row_holds(kBF16), n);
    const KernelText text{"rows", {rows_instance(kBF16, hold)}};
    auto x = elements<fn::BF16>(size_t(3 * n), 3);
    x[size_t(n + 7)] = narrow<fn::BF16>(std::numeric_limits<double>::quiet_NaN());
    Array<fn::BF16> in(x), out(x.size());
    RowsCall c{};
    c.in = in.get(), c.out = out.get(), c.rows = 3, c.n = unsigned(n);
    c.packs = rows_in_packs(kBF16, hold, n);
    d().launch(d().function(text, text.instances[0].name + "_softmax"), rows_geometry(hold, 3), c);
    const auto got = out.read();
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(std::isnan(wide(got[i])), i / size_t(n) == 1) << n << ' ' << i;
  }
}

struct NormCase {
  int64_t rows, n;
  bool centred, weighted;
};
// Gradients of a norm against loops in double that begin at the statistics that the norm wrote.
template <class T>
void check_norm(const NormCase& o) {
  Device& d = *Device::get();
  constexpr DType t = kDType<T>;
  const int64_t rows = o.rows, n = o.n;
  const RowHold hold = hold_of(row_holds(t), n), grad_hold = norm_grad_hold(t, n, true);
  const KernelText text{"rows", {rows_instance(t, hold)}},
      grads{"norm_grad", {norm_grad_instance(t, grad_hold)}};
  const auto x = elements<T>(size_t(rows * n), 2, -1, 3), g = elements<T>(size_t(rows * n), 7);
  auto w = elements<T>(size_t(n), 4), b = elements<T>(size_t(n), 5);
  Array<T> dx(x), dg(g), dw(w), db(b), y(x.size()), z(x.size());
  Array<float> mean{size_t(rows)}, rstd{size_t(rows)};
  const std::string name = o.centred ? "_layer_norm" : "_rms_norm";
  RowsCall c{};
  c.in = dx.get(), c.out = y.get(), c.rows = unsigned(rows), c.n = unsigned(n), c.eps = 1e-5;
  c.packs = rows_in_packs(t, hold, n);
  if (o.weighted) c.weight = dw.get(), c.bias = db.get();
  c.mean = o.centred ? mean.get() : nullptr, c.rstd = rstd.get();
  d.launch(d.function(text, text.instances[0].name + name), rows_geometry(hold, rows), c);
  c.out = z.get(), c.other = dg.get();
  const NormSums sums = norm_sums(grad_hold, rows, n);
  Array<float> pw(sums.pieces * size_t(n)), pb(sums.pieces * size_t(n));
  c.piece = sums.piece, c.pieces = sums.pieces, c.dw = pw.get(), c.db = pb.get();
  const std::string grad_name = grads.instances[0].name;
  const bool pieces = grad_hold.items != 0;
  d.launch(d.function(grads, grad_name + name + "_grad"),
           pieces ? sums.geometry : rows_geometry(grad_hold, rows), c);
  if (!pieces) d.launch(d.function(grads, grad_name + "_norm_sums"), sums.geometry, c);
  if (!o.weighted) w.assign(w.size(), narrow<T>(1)), b.assign(b.size(), narrow<T>(0));
  const auto got = y.read(), grad = z.read();
  const auto gw = pw.read(), gb = pb.read();
  std::vector<double> sw(size_t(n), 0.0), sb(size_t(n), 0.0);
  for (int64_t r = 0; r < rows; ++r) {
    const T *xr = &x[size_t(r * n)], *gr = &g[size_t(r * n)];
    double mu = 0, var = 0, mq = 0, mqh = 0;
    for (int64_t k = 0; k < n; ++k) mu += o.centred ? wide(xr[k]) / double(n) : 0;
    for (int64_t k = 0; k < n; ++k) var += (wide(xr[k]) - mu) * (wide(xr[k]) - mu) / double(n);
    const double s = 1 / std::sqrt(var + 1e-5);
    for (int64_t k = 0; k < n; ++k) {
      const double h = (wide(xr[k]) - mu) * s, q = double(wide(gr[k])) * wide(w[size_t(k)]);
      mq += o.centred ? q / double(n) : 0, mqh += q * h / double(n);
      sw[size_t(k)] += wide(gr[k]) * h, sb[size_t(k)] += wide(gr[k]);
    }
    for (int64_t k = 0; k < n; ++k) {
      const double h = (wide(xr[k]) - mu) * s, q = double(wide(gr[k])) * wide(w[size_t(k)]);
      const size_t i = size_t(r * n + k);
      ASSERT_TRUE(near(got[i], h * wide(w[size_t(k)]) + wide(b[size_t(k)]), 1e-5)) << n << ' ' << k;
      ASSERT_TRUE(near(grad[i], s * (q - mq - h * mqh), 2e-5)) << n << ' ' << r << ' ' << k;
    }
  }
  for (int64_t k = 0; k < n; ++k) {
    double tw = 0, tb = 0;
    for (unsigned p = 0; p < sums.pieces; ++p)
      tw += gw[p * size_t(n) + size_t(k)], tb += gb[p * size_t(n) + size_t(k)];
    ASSERT_NEAR(tw, sw[size_t(k)], 1e-4) << n << ' ' << k;
    ASSERT_NEAR(tb, sb[size_t(k)], 1e-4) << n << ' ' << k;
  }
}
TEST_F(Rows, NormsAndTheirGradients) {
  for (const bool centred : {true, false}) {
    for (const int64_t n : {24, 300, 8200})
      check_norm<float>({n > 1024 ? 3 : 70, n, centred, true});
    // Pieces that end early or are not there, threads without columns, rows without packs.
    for (const int64_t n : {120, 128, 200, 250, 1000, 1500, 4096})
      check_norm<fn::BF16>({n > 1024 ? 6 : n == 128 ? 150 : 11, n, centred, n != 200});
    check_norm<fn::F16>({9, 72, centred, true});
    check_norm<float>({5, 6000, centred, false});
  }
}
TEST_F(Rows, PiecesOfGradientsOfNorms) {
  for (const int64_t rows : {0L, 1L, 5L, 1000L, 131072L, 1L << 20, (1L << 31) - 1})
    for (const RowHold& hold : norm_grad_holds(kBF16)) {
      const NormSums s = norm_sums(hold, rows, hold.items ? hold.threads * hold.items : 10000);
      ASSERT_GE(int64_t(s.piece) * s.pieces, rows);
      if (rows > 0) {
        ASSERT_LT(int64_t(s.piece) * (s.pieces - 1), rows);
      }
      if (hold.items == 0) continue;
      // Blocks that run at once on an H100, unless a thread would add too many rows.
      ASSERT_LE(s.piece, 512u);
      if (s.piece == 512) continue;
      ASSERT_LE(s.geometry.grid[0], hold.threads == 512 ? 132 : 132 * 768 / s.geometry.block[0]);
      ASSERT_GE(int64_t(s.geometry.grid[0]) * s.geometry.block[0],
                int64_t(s.pieces) * hold.threads);
    }
}

struct LossCase {
  int64_t rows, n;
  bool packs = true, with_grad = true;
};
template <class T>
void check_cross_entropy(const LossCase& o) {
  Device& d = *Device::get();
  constexpr DType t = kDType<T>;
  const int64_t rows = o.rows, n = o.n, ignored = -100;
  const RowHold hold = hold_of(loss_holds(t), n);
  const KernelText text{"losses", {loss_instance(t, hold)}};
  auto x = elements<T>(size_t(rows * n), 2, -3, 3);
  // A row that rises, so that maxima are found again and again, and one that begins with nothing.
  for (int64_t k = 0; k < n; ++k) x[size_t(n + k)] = narrow<T>(double(k) * 20 / double(n) - 5);
  for (int64_t k = 0; k < n / 2; ++k)
    x[size_t(2 * n + k)] = narrow<T>(-std::numeric_limits<double>::infinity());
  std::vector<long> targets(static_cast<size_t>(rows));
  for (size_t r = 0; r < targets.size(); ++r) targets[r] = n - 1 - long(r * 7) % n;
  targets[3] = ignored;
  Array<T> in(x), grad(x.size());
  Array<float> terms{size_t(rows)}, scale(1), loss(1);
  Array<long> dt(targets);
  Array<Report> report(1);
  report.fill(0);
  LossCall c{in.get(),
             dt.get(),
             terms.get(),
             scale.get(),
             o.with_grad ? grad.get() : nullptr,
             loss.get(),
             report.get(),
             ignored,
             unsigned(rows),
             unsigned(n),
             o.packs && rows_in_packs(t, hold, n),
             1};
  const std::string name = text.instances[0].name;
  auto run = [&] {
    if (o.with_grad) d.launch(d.function(text, name + "_count"), {{1, 1, 1}, {256, 1, 1}, 0}, c);
    d.launch(d.function(text, name + "_rows"), rows_geometry(hold, rows), c);
    d.launch(d.function(text, name + "_finish"), {{1, 1, 1}, {256, 1, 1}, 0}, c);
  };
  run();
  double expected = 0;
  std::vector<T> got;
  if (o.with_grad) got = grad.read();
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = &x[size_t(r * n)];
    const long target = targets[size_t(r)];
    double total = 0;
    for (int64_t k = 0; k < n; ++k) total += std::exp(double(wide(row[k])));
    if (target != ignored) expected += (std::log(total) - wide(row[target])) / double(rows - 1);
    for (int64_t k = 0; k < n && o.with_grad; ++k) {
      const double slope =
          (std::exp(double(wide(row[k]))) / total - (k == target)) / double(rows - 1);
      ASSERT_TRUE(near(got[size_t(r * n + k)], target == ignored ? 0 : slope, 1e-6))
          << n << ' ' << r << ' ' << k;
    }
  }
  EXPECT_NEAR(loss.read()[0], expected, 1e-5 * expected) << n;
  EXPECT_EQ(report.read()[0], 0u);
  targets[5] = n, targets[9] = -1;
  dt.write(targets);
  run();
  EXPECT_EQ(refused_of(report.read()[0]).position, 5);
}
TEST_F(Rows, CrossEntropyAndItsGradient) {
  for (const int64_t n : {10, 3000}) check_cross_entropy<float>({21, n});
  check_cross_entropy<float>({12, 9000}), check_cross_entropy<float>({12, 9001});
  check_cross_entropy<float>({12, 9000, true, false}),
      check_cross_entropy<float>({12, 40, true, false});
  for (const int64_t n : {10, 256, 1000, 4000, 17000, 16392})
    check_cross_entropy<fn::BF16>({11, n});
  check_cross_entropy<fn::BF16>({11, 17000, false}), check_cross_entropy<fn::F16>({10, 8200});
}
TEST_F(Rows, CrossEntropyOfLongRowsKeepsNanAndNothing) {
  const int64_t n = 9000;
  const RowHold hold = hold_of(loss_holds(kF32), n);
  const KernelText text{"losses", {loss_instance(kF32, hold)}};
  auto x = numbers<float>(size_t(3 * n), 2);
  x[7000] = std::numeric_limits<float>::quiet_NaN();
  for (int64_t k = 0; k < n; ++k) x[size_t(n + k)] = -std::numeric_limits<float>::infinity();
  Array<float> in(x), terms(3);
  Array<long> targets(std::vector<long>{1, 2, 3});
  Array<Report> report(1);
  report.fill(0);
  LossCall c{};
  c.in = in.get(), c.targets = targets.get(), c.terms = terms.get(), c.report = report.get();
  c.ignored = -100, c.rows = 3, c.n = unsigned(n), c.packs = 1;
  d().launch(d().function(text, text.instances[0].name + "_rows"), rows_geometry(hold, 3), c);
  const auto got = terms.read();
  EXPECT_TRUE(std::isnan(got[0]));
  EXPECT_TRUE(std::isnan(got[1]));
  EXPECT_TRUE(std::isfinite(got[2]));
}

}  // namespace
}  // namespace tessera::cuda::test
