// matmul.cu and attention.cu against plain loops in double.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <random>

#include "core/backend/cuda/kernels/attention.h"
#include "core/backend/cuda/kernels/matmul.h"
#include "tests/cuda/kernels_device.h"
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/convert.h"
// clang-format on

namespace tessera::cuda::test {
namespace {

class Matmul : public testing::Test {
 protected:
  void SetUp() override {
    if (!Device::get()) GTEST_SKIP() << Device::why();
  }
  Device& d() { return *Device::get(); }
};
class Attention : public Matmul {};

template <class T>
T narrow(double x) {
  if constexpr (std::is_same_v<T, fn::BF16>)
    return fn::to_bf16(float(x));
  else
    return T(x);
}
double wide(float x) { return double(x); }
double wide(double x) { return x; }
double wide(fn::BF16 x) { return double(fn::widen(x)); }

template <class T>
std::vector<T> numbers(size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> x(n);
  for (T& v : x) v = narrow<T>(double(int(random() % 2001) - 1000) * 1e-3);
  return x;
}

// Batches [2, 3] of a [m, k] and of b [k, n] that all of the second dim share; transposed by
// request.
template <class T>
void check_product(DType t, int64_t m, int64_t n, int64_t k, bool a_turned, bool b_turned,
                   bool accumulate, double tolerance) {
  Device& d = *Device::get();
  const auto a = numbers<T>(size_t(6 * m * k), 1), b = numbers<T>(size_t(2 * k * n), 2),
             c = numbers<T>(size_t(6 * m * n), 3);
  Array<T> da(a), db(b), dc(c);
  const int64_t batch[] = {2, 3}, ab[] = {3 * m * k, m * k}, bb[] = {k * n, 0},
                cb[] = {3 * m * n, m * n};
  const Matrices am{da.get(), a_turned ? 1 : k, a_turned ? m : 1, ab};
  const Matrices bm{db.get(), b_turned ? 1 : n, b_turned ? k : 1, bb};
  const Matrices cm{dc.get(), n, 1, cb};
  const KernelText text{"matmul", {matmul_instance(t)}};
  const auto launches = matmul_launches(t, batch, m, n, k, cm, am, bm, accumulate);
  ASSERT_EQ(launches.size(), 1u);
  d.launch(d.function(text, text.instances[0].name + "_matmul"), launches[0].geometry,
           launches[0].call);
  const auto got = dc.read();
  for (int64_t i = 0; i < 6; ++i)
    for (int64_t r = 0; r < m; ++r)
      for (int64_t q = 0; q < n; ++q) {
        double sum = accumulate ? wide(c[size_t((i * m + r) * n + q)]) : 0;
        for (int64_t l = 0; l < k; ++l)
          sum += wide(a[size_t(i * m * k + r * am.row + l * am.column)]) *
                 wide(b[size_t(i / 3 * k * n + l * bm.row + q * bm.column)]);
        ASSERT_NEAR(wide(got[size_t((i * m + r) * n + q)]), sum, tolerance * (1 + std::abs(sum)))
            << m << ' ' << n << ' ' << k << " at " << r << ' ' << q;
      }
}

TEST_F(Matmul, SinglePrecision) {
  check_product<float>(kF32, 70, 9, 33, false, false, false, 1e-5);
  check_product<float>(kF32, 8, 66, 20, true, true, true, 1e-5);
  check_product<float>(kF32, 3, 4, 0, false, false, false, 0);
}
TEST_F(Matmul, BrainFloatsOnMatrixUnits) {
  check_product<fn::BF16>(kBF16, 24, 40, 64, false, true, false, 0.006);  // packs on both sides
  check_product<fn::BF16>(kBF16, 17, 9, 21, true, false, true, 0.006);
}

// One batch of two heads in one tensor [positions, heads, width], queries and keys of other
// numbers.
template <class T>
void check_attention(DType t, bool causal, double tolerance) {
  using C = std::conditional_t<std::is_same_v<T, fn::BF16>, float, T>;
  Device& d = *Device::get();
  const int64_t heads = 2, queries = 70, keys = causal ? 70 : 45, width = 20, values = 24;
  const double scale = 0.3;
  const auto q = numbers<T>(size_t(queries * heads * width), 1),
             k = numbers<T>(size_t(keys * heads * width), 2),
             v = numbers<T>(size_t(keys * heads * values), 3),
             g = numbers<T>(size_t(queries * heads * values), 4);
  Array<T> dq(q), dk(k), dv(v), dg(g), out(g.size()), gq(q.size()), gk(k.size()), gv(v.size());
  Array<C> lse(size_t(heads * queries)), delta(size_t(heads * queries));
  auto operand = [&](const Array<T>& x, int64_t w) {
    return AttentionOperand{x.get(), 0, w, heads * w};
  };
  AttentionCall c{operand(dq, width),
                  operand(dk, width),
                  operand(dv, values),
                  operand(out, values),
                  operand(dg, values),
                  operand(gq, width),
                  operand(gk, width),
                  operand(gv, values),
                  lse.get(),
                  delta.get(),
                  scale,
                  int(heads),
                  int(queries),
                  int(keys),
                  int(width),
                  int(values),
                  causal};
  const KernelText text{"attention", {attention_instance(t, 64)}};
  auto run = [&](const char* entry, AttentionEntry e, int64_t positions) {
    d.launch(d.function(text, text.instances[0].name + entry),
             attention_geometry(e, t, 64, heads, positions), c);
  };
  run("_forward", AttentionEntry::kForward, queries);
  run("_delta", AttentionEntry::kDelta, queries);
  run("_queries", AttentionEntry::kQueries, queries);
  run("_keys", AttentionEntry::kKeys, keys);
  const auto y = out.read(), rq = gq.read(), rk = gk.read(), rv = gv.read();
  for (int64_t h = 0; h < heads; ++h) {
    auto at = [&](const auto& x, int64_t r, int64_t w, int64_t l) {
      return wide(x[size_t((r * heads + h) * w + l)]);
    };
    std::vector<double> sq(size_t(queries * width)), sk(size_t(keys * width)),
        sv(size_t(keys * values));
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t n = causal ? i + 1 : keys;
      std::vector<double> p(static_cast<size_t>(n)), dp(static_cast<size_t>(n));
      double total = 0, dot = 0;
      for (int64_t j = 0; j < n; ++j) {
        double s = 0;
        for (int64_t l = 0; l < width; ++l) s += at(q, i, width, l) * at(k, j, width, l);
        total += p[size_t(j)] = std::exp(s * scale);
      }
      for (int64_t l = 0; l < values; ++l) {
        double sum = 0;
        for (int64_t j = 0; j < n; ++j) sum += p[size_t(j)] / total * at(v, j, values, l);
        ASSERT_NEAR(at(y, i, values, l), sum, tolerance) << i << ' ' << l;
      }
      for (int64_t j = 0; j < n; ++j) {
        p[size_t(j)] /= total;
        for (int64_t l = 0; l < values; ++l) {
          dp[size_t(j)] += at(g, i, values, l) * at(v, j, values, l);
          sv[size_t(j * values + l)] += p[size_t(j)] * at(g, i, values, l);
        }
        dot += p[size_t(j)] * dp[size_t(j)];
      }
      for (int64_t j = 0; j < n; ++j)
        for (int64_t l = 0; l < width; ++l) {
          const double ds = p[size_t(j)] * (dp[size_t(j)] - dot) * scale;
          sq[size_t(i * width + l)] += ds * at(k, j, width, l);
          sk[size_t(j * width + l)] += ds * at(q, i, width, l);
        }
    }
    for (int64_t i = 0; i < queries; ++i)
      for (int64_t l = 0; l < width; ++l)
        ASSERT_NEAR(at(rq, i, width, l), sq[size_t(i * width + l)], 5 * tolerance);
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t l = 0; l < width; ++l)
        ASSERT_NEAR(at(rk, j, width, l), sk[size_t(j * width + l)], 5 * tolerance);
      for (int64_t l = 0; l < values; ++l)
        ASSERT_NEAR(at(rv, j, values, l), sv[size_t(j * values + l)], 5 * tolerance);
    }
  }
}

TEST_F(Attention, ForwardAndBackward) {
  check_attention<float>(kF32, false, 2e-6);
  check_attention<float>(kF32, true, 2e-6);
}
TEST_F(Attention, OtherTypes) {
  check_attention<fn::BF16>(kBF16, true, 0.02);
  check_attention<double>(kF64, false, 1e-13);
}

}  // namespace
}  // namespace tessera::cuda::test
