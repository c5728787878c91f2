// scan.cu and pool.cu against plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "core/backend/cuda/kernels/scan.h"
#include "core/backend/cuda/kernels/walk.h"
#include "tests/cuda/kernels_device.h"

namespace tessera::cuda::test {
namespace {

class Scan : public KernelTest {};
class Pool : public KernelTest {};

// Whole numbers, so that sums are exact in any order.
std::vector<float> numbers(size_t n, unsigned seed, int most = 9) {
  std::mt19937 random(seed);
  std::vector<float> x(n);
  for (float& v : x) v = float(int(random() % unsigned(2 * most + 1)) - most);
  return x;
}

TEST_F(Scan, LinesAndBlocks) {
  const KernelText text{"scan",
                        {scan_instance("cumsum", kF32), scan_instance("cummax", kF32),
                         scan_instance("linear_scan", kF32), scan_instance("logcumsumexp", kF32)}};
  struct Case {
    int64_t outer, n, inner;
    bool reverse;
  };
  for (const Case& c : {Case{2, 30, 3, false}, Case{1, 2500, 1, false}, Case{2, 700, 2, true}}) {
    const size_t size = size_t(c.outer * c.n * c.inner);
    auto x = numbers(size, 1);
    const auto terms = numbers(size, 2);
    Array<float> in(x), other(terms), out(size);
    Array<long> at(size);
    ScanCall call{in.get(),      other.get(),       out.get(), at.get(), unsigned(c.outer),
                  unsigned(c.n), unsigned(c.inner), c.reverse, false};
    const ScanLaunch l = scan_launch("cumsum", kF32, call);
    auto run = [&](const char* op) {
      d().launch(d().function(text, std::string(op) + "_f32_" + l.entry), l.geometry, call);
      return out.read();
    };
    // Calls f(first, previous offset, offset, place) along every line.
    auto along = [&](auto f) {
      for (int64_t o = 0; o < c.outer; ++o)
        for (int64_t i = 0; i < c.inner; ++i)
          for (int64_t k = 0, before = 0; k < c.n; ++k) {
            const int64_t place = c.reverse ? c.n - 1 - k : k, e = (o * c.n + place) * c.inner + i;
            f(k == 0, size_t(before), size_t(e), place);
            before = e;
          }
    };
    std::vector<float> sums(size);
    along([&](bool first, size_t b, size_t e, int64_t) { sums[e] = (first ? 0 : sums[b]) + x[e]; });
    EXPECT_EQ(run("cumsum"), sums) << c.n;

    x[size / 2] = std::numeric_limits<float>::quiet_NaN();
    in.write(std::span<const float>(x));
    const auto most = run("cummax");
    const auto where = at.read();
    std::vector<float> best(size);
    std::vector<long> place(size);
    along([&](bool first, size_t b, size_t e, int64_t k) {
      const bool takes = first || x[e] != x[e] || x[e] >= best[b];
      best[e] = takes ? x[e] : best[b], place[e] = takes ? k : place[b];
    });
    EXPECT_EQ(where, place) << c.n;
    for (size_t i = 0; i < size; ++i)
      ASSERT_TRUE(most[i] == best[i] || (std::isnan(most[i]) && std::isnan(best[i]))) << i;

    auto factors = numbers(size, 3, 1);  // -1, 0 or 1
    in.write(std::span<const float>(factors));
    std::vector<float> states(size);
    along([&](bool first, size_t b, size_t e, int64_t) {
      states[e] = first ? terms[e] : factors[e] * states[b] + terms[e];
    });
    EXPECT_EQ(run("linear_scan"), states) << c.n;

    const auto logs = run("logcumsumexp");
    std::vector<double> total(size);
    along([&](bool first, size_t b, size_t e, int64_t) {
      total[e] = (first ? 0 : total[b]) + std::exp(double(factors[e]));
    });
    for (size_t i = 0; i < size; ++i) ASSERT_NEAR(logs[i], std::log(total[i]), 2e-5) << i;
  }
}

// Many lines, by a warp each: sums that are rounded, in the order of blocks.
TEST_F(Scan, WarpsHaveTheBitsOfBlocks) {
  KernelText text{"scan", {}};
  for (DType t : {kF32, kBF16, kF16})
    for (const char* op : {"cumsum", "cumprod"}) text.instances.push_back(scan_instance(op, t));
  struct Case {
    unsigned n, shift;
    bool packs;
  };
  for (DType t : {kF32, kBF16, kF16})
    for (const std::string op : {"cumsum", "cumprod"})
      for (const Case& k : {Case{1024, 0, true}, Case{516, 0, true}, Case{2500, 0, true},
                            Case{517, 0, false}, Case{1030, 0, false}, Case{516, 1, false}})
        for (const bool reverse : {false, true}) {
          const unsigned lines = 11;
          const size_t bytes = size_of(t), size = size_t(lines) * k.n * bytes;
          std::mt19937 random(k.n);
          std::vector<uint16_t> x((size + bytes) / 2 + 8);
          // Numbers of either sign about 1: the upper half of an f32, or one of 16 bits.
          const unsigned one = t == kF16 ? 0x3b80 : 0x3f70;
          for (size_t i = 0; i < x.size(); ++i)
            x[i] = uint16_t(t != kF32 || i % 2 ? one + random() % 33 + random() % 2 * 0x8000
                                               : random());
          Array<uint16_t> in(x);
          ScanCall c{};
          c.in = reinterpret_cast<char*>(in.get()) + k.shift * bytes;
          c.n = k.n, c.inner = 1, c.reverse = reverse;
          auto run = [&](const char* entry, unsigned of_block) {
            Array<unsigned char> out(size + 2 * bytes);
            out.fill(0xab);
            c.out = out.get() + k.shift * bytes;
            c.outer = of_block == 1 ? lines : 1024;  // as many as warps are for
            ScanLaunch l = scan_launch(op, t, c);
            EXPECT_STREQ(l.entry, entry);
            c.outer = lines, l.geometry.grid[0] = (lines + of_block - 1) / of_block;
            d().launch(d().function(text, scan_instance(op, t).name + "_" + entry), l.geometry, c);
            return out.read();
          };
          EXPECT_EQ(run("warps", 8), run("blocks", 1))
              << op << ' ' << name_of(t) << ' ' << k.n << ' ' << reverse;
          EXPECT_EQ(bool(c.packs), k.packs);
        }
}

// Images [2, 3, 7, 6], channels first; windows of 3 x 2, stride 2, padding 1, 2 apart in one dim.
TEST_F(Pool, WindowsAndTheirGradients) {
  const KernelText text{"pool", {pool_instance(kF32)}};
  for (const bool adaptive : {false, true}) {
    PoolCall c{};
    c.dim[0] = {1, 1, 1, 1, 0, 1};
    c.dim[1] = adaptive ? PoolDim{7, 3, 1, 1, 0, 1} : PoolDim{7, 4, 3, 2, 1, 1};
    c.dim[2] = adaptive ? PoolDim{6, 4, 1, 1, 0, 1} : PoolDim{6, 3, 2, 2, 1, 2};
    const int64_t oh = c.dim[1].out, ow = c.dim[2].out, outs = oh * ow;
    c.x = {3 * 42, 42, {0, 6, 1}}, c.y = {3 * outs, outs, {0, ow, 1}};
    c.channels = 3, c.adaptive = adaptive, c.count_padding = 1;
    const auto x = numbers(2 * 3 * 42, 1), g = numbers(size_t(6 * outs), 2);
    Array<float> in(x), out(g.size()), cotangent(g), grad(x.size());
    Array<int> places(g.size());
    auto inside = [&](int d, int64_t o, int64_t i) {
      const PoolDim& p = c.dim[d];
      if (adaptive) return i >= o * p.in / p.out && i < ((o + 1) * p.in + p.out - 1) / p.out;
      const int64_t from = i - (o * p.stride - p.padding);
      return from >= 0 && from % p.dilation == 0 && from / p.dilation < p.kernel;
    };
    for (const bool largest : {true, false}) {
      c.in = in.get(), c.out = out.get(), c.places = places.get(), c.count = unsigned(g.size());
      const std::string name = largest ? "pool_f32_max_pool" : "pool_f32_avg_pool";
      d().launch(d().function(text, name), cover(c.count, 256), c);
      c.in = cotangent.get(), c.out = grad.get(), c.count = unsigned(x.size());
      d().launch(d().function(text, name + "_grad"), cover(c.count, 256), c);
      const auto y = out.read(), dx = grad.read();
      std::vector<float> expected(x.size(), 0.0f);
      for (int64_t p = 0; p < 6; ++p)
        for (int64_t a = 0; a < oh; ++a)
          for (int64_t b = 0; b < ow; ++b) {
            float best = -1e30f, sum = 0;
            int64_t at = 0, count = 0;
            for (int64_t i = 0; i < 7; ++i)
              for (int64_t j = 0; j < 6; ++j) {
                if (!inside(1, a, i) || !inside(2, b, j)) continue;
                const float v = x[size_t(p * 42 + i * 6 + j)];
                sum += v, ++count;
                if (v > best) best = v, at = i * 6 + j;
              }
            // Padding counts, but only up to the padded end.
            auto extent = [&](int d, int64_t o) {
              const PoolDim& q = c.dim[d];
              const int64_t from = o * q.stride - q.padding;
              return std::min<int64_t>(from + q.kernel, q.in + q.padding) - from;
            };
            const auto divisor = float(adaptive ? count : extent(1, a) * extent(2, b));
            const size_t e = size_t(p * outs + a * ow + b);
            ASSERT_EQ(y[e], largest ? best : sum / divisor) << a << ' ' << b;
            if (largest) expected[size_t(p * 42 + at)] += g[e];
            for (int64_t i = 0; !largest && i < 7; ++i)
              for (int64_t j = 0; j < 6; ++j)
                if (inside(1, a, i) && inside(2, b, j))
                  expected[size_t(p * 42 + i * 6 + j)] += g[e] / divisor;
          }
      EXPECT_EQ(dx, expected) << adaptive << largest;
    }
  }
}

}  // namespace
}  // namespace tessera::cuda::test
