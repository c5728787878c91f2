// matmul.cu and attention.cu against plain loops in double.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>

#include "core/backend/cuda/kernels/attention.h"
#include "core/backend/cuda/kernels/matmul.h"
#include "core/tensor/philox.h"
#include "tests/cuda/kernels_device.h"
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/convert.h"
// clang-format on

namespace tessera::cuda::test {
namespace {

class Matmul : public KernelTest {};
class Attention : public KernelTest {};

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

// How an operand lies: by rows, by columns, or at strides that no pack fits.
enum class Lie { kRows, kTurned, kLoose };

// Batches [2, 3] of a [m, k] and of b [k, n] that all of the second dim share.
template <class T>
struct Operands {
  int64_t m, n, k;
  std::vector<T> a, b;
  Array<T> da, db;
  std::array<int64_t, 2> ab, bb, batch{2, 3};
  Matrices am, bm;
  Operands(int64_t m_, int64_t n_, int64_t k_, Lie a_lies, Lie b_lies)
      : m(m_),
        n(n_),
        k(k_),
        a(numbers<T>(size_t(12 * m * k), 1)),
        b(numbers<T>(size_t(4 * k * n), 2)),
        da(a),
        db(b) {
    auto lie = [](Lie how, int64_t rows, int64_t columns) {
      return how == Lie::kRows     ? std::pair<int64_t, int64_t>{columns, 1}
             : how == Lie::kTurned ? std::pair<int64_t, int64_t>{1, rows}
                                   : std::pair<int64_t, int64_t>{2 * columns, 2};
    };
    const auto [ar, ac] = lie(a_lies, m, k);
    const auto [br, bc] = lie(b_lies, k, n);
    const int64_t each_a = a_lies == Lie::kLoose ? 2 * m * k : m * k,
                  each_b = b_lies == Lie::kLoose ? 2 * k * n : k * n;
    ab = {3 * each_a, each_a}, bb = {each_b, 0};
    am = {da.get(), ar, ac, ab}, bm = {db.get(), br, bc, bb};
  }
  double left(int64_t i, int64_t r, int64_t l) const {
    return wide(a[size_t(i * ab[1] + r * am.row + l * am.column)]);
  }
  double right(int64_t i, int64_t l, int64_t q) const {
    return wide(b[size_t(i / 3 * bb[0] + l * bm.row + q * bm.column)]);
  }
};

// `Out` is float where the sum is wide.
template <class T, class Out = T>
std::vector<Out> product(DType t, const Operands<T>& o, int64_t c_row, const MatmulSum& sum) {
  Device& d = *Device::get();
  Array<Out> dc(size_t(sum.parts * 6 * o.m * c_row));
  dc.fill(0);
  const int64_t cb[] = {3 * o.m * c_row, o.m * c_row};
  const auto launches =
      matmul_launches(t, o.batch, o.m, o.n, o.k, {dc.get(), c_row, 1, cb}, o.am, o.bm, sum);
  const KernelText text{"matmul", matmul_instances(t)};
  for (const MatmulLaunch& l : launches)
    d.launch(d.function(text, l.instance + "_matmul"), l.geometry, l.call);
  return dc.read();
}

template <class T>
void check_product(DType t, int64_t m, int64_t n, int64_t k, Lie a_lies, Lie b_lies,
                   double tolerance, int64_t parts = 1) {
  const Operands<T> o(m, n, k, a_lies, b_lies);
  const int64_t row = n + n % 2, size = 6 * m * row;
  std::vector<double> got;
  auto read = [&](const auto& values) {
    for (const auto& v : values) got.push_back(wide(v));
  };
  if (parts > 1)
    read(product<T, float>(t, o, row, {.parts = parts, .part_stride = size, .wide = true}));
  else
    read(product<T>(t, o, row, {}));
  for (int64_t i = 0; i < 6; ++i)
    for (int64_t r = 0; r < m; ++r)
      for (int64_t q = 0; q < n; ++q) {
        double sum = 0, all = 0;
        for (int64_t l = 0; l < k; ++l) sum += o.left(i, r, l) * o.right(i, l, q);
        for (int64_t p = 0; p < parts; ++p) all += got[size_t(p * size + (i * m + r) * row + q)];
        ASSERT_NEAR(all, sum, tolerance * (1 + std::abs(sum)))
            << m << ' ' << n << ' ' << k << " at " << r << ' ' << q;
      }
}

TEST_F(Matmul, SinglePrecision) {
  check_product<float>(kF32, 70, 9, 33, Lie::kRows, Lie::kRows, 1e-5);
  check_product<float>(kF32, 8, 66, 20, Lie::kTurned, Lie::kTurned, 1e-5);
  check_product<float>(kF32, 3, 4, 0, Lie::kRows, Lie::kRows, 0);
}
// Each way to lie, in packs and one by one. 32 of k are a stage, and four stages are on their way.
TEST_F(Matmul, BrainFloatsOnMatrixUnits) {
  for (Lie a : {Lie::kRows, Lie::kTurned, Lie::kLoose})
    for (Lie b : {Lie::kRows, Lie::kTurned, Lie::kLoose})
      check_product<fn::BF16>(kBF16, 17, 9, 21, a, b, 0.01);
  check_product<fn::BF16>(kBF16, 24, 40, 200, Lie::kRows, Lie::kTurned, 0.01);
  check_product<fn::BF16>(kBF16, 136, 8, 168, Lie::kTurned, Lie::kRows, 0.01);
}
TEST_F(Matmul, SumsInParts) {
  check_product<float>(kF32, 9, 10, 300, Lie::kTurned, Lie::kRows, 1e-5, 3);
  check_product<fn::BF16>(kBF16, 9, 16, 300, Lie::kTurned, Lie::kTurned, 1e-5, 4);
  check_product<float>(kF32, 5, 4, 70, Lie::kRows, Lie::kRows, 1e-5,
                       4);  // the last parts are empty
}

// A chain of each leaf, and leaves by pairs.
TEST_F(Matmul, ExactSumsAreTrees) {
  for (int64_t leaves : {1, 2, 8}) {
    const Operands<float> o(5, 70, 40, Lie::kRows, Lie::kTurned);
    const auto got = product<float>(kF32, o, o.n, {.leaves = leaves});
    for (int64_t i = 0; i < 6; ++i)
      for (int64_t r = 0; r < o.m; ++r)
        for (int64_t q = 0; q < o.n; ++q) {
          std::vector<float> sums;
          const int64_t each = o.k / leaves;
          for (int64_t leaf = 0; leaf < leaves; ++leaf) {
            float sum = 0;
            for (int64_t l = leaf * each; l < (leaf + 1) * each; ++l)
              sum = std::fma(float(o.left(i, r, l)), float(o.right(i, l, q)), sum);
            sums.push_back(sum);
          }
          for (; sums.size() > 1; sums.resize(sums.size() / 2))
            for (size_t p = 0; p < sums.size() / 2; ++p) sums[p] = sums[2 * p] + sums[2 * p + 1];
          ASSERT_EQ(got[size_t((i * o.m + r) * o.n + q)], sums[0])
              << leaves << ' ' << r << ' ' << q;
        }
  }
}

// What a mask holds: a bool for each key, the same for all queries, false behind the first tile;
// one for each score; a number for each score, some -inf. One query attends to no key.
enum class Mask { kNone, kKeys, kScores, kNumbers };
// Words of each four keys are a block, or parts of two; then the draw is by sample.
enum class Drop { kNone, kAligned, kApart };

// One batch of two heads in one tensor [positions, heads, width], queries and keys of other
// numbers.
template <class T>
void check_attention(DType t, AttentionShape shape, bool causal, double tolerance,
                     int64_t width = 20, unsigned packs = 0, Mask mask = Mask::kNone,
                     Drop drop = Drop::kNone) {
  using C = std::conditional_t<std::is_same_v<T, fn::BF16>, float, T>;
  Device& d = *Device::get();
  const int64_t heads = 2, queries = 70, keys = causal ? 70 : 45,
                values = packs ? width : width + 4;
  const double scale = 0.3;
  const auto q = numbers<T>(size_t(queries * heads * width), 1),
             k = numbers<T>(size_t(keys * heads * width), 2),
             g = numbers<T>(size_t(queries * heads * values), 4);
  auto v = numbers<T>(size_t(keys * heads * values), 3);
  // A tile of keys that are all hidden is not multiplied.
  const int64_t hidden = shape.tile < keys ? shape.tile : keys - 1, blank = 3;
  const bool skips = mask == Mask::kKeys && shape.tile < keys;
  if (skips) std::fill(v.begin() + hidden * heads * values, v.end(), narrow<T>(NAN));
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
                  causal,
                  packs,
                  nullptr,
                  0,
                  0,
                  0,
                  0,
                  0,
                  nullptr,
                  7,
                  3,
                  nullptr,
                  0,
                  0,
                  0,
                  0,
                  0,
                  0,
                  0};
  std::vector<C> adds(static_cast<size_t>(heads * queries * keys));
  std::vector<uint8_t> sees(adds.size());
  const auto drawn = numbers<C>(adds.size(), 5);
  const auto place = [&](int64_t h, int64_t i, int64_t j) {
    return size_t((h * queries + i) * keys + j);
  };
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < queries; ++i)
      for (int64_t j = 0; j < keys; ++j) {
        const size_t at = place(h, i, j);
        bool there = true;
        if (mask == Mask::kKeys) there = j < hidden && j % 3 != h;
        if (mask > Mask::kKeys) there = i != blank && drawn[at] > C(-0.3);
        sees[at] = there, adds[at] = !there ? C(-INFINITY) : mask == Mask::kNumbers ? drawn[at] : 0;
      }
  Array<uint8_t> on_card(sees);
  Array<C> numbers_on_card(adds);
  c.mask_is_bool = mask != Mask::kNumbers;
  if (mask != Mask::kNone)
    c.mask = c.mask_is_bool ? (const void*)on_card.get() : numbers_on_card.get();
  c.mask_head = queries * keys, c.mask_query = mask == Mask::kKeys ? 0 : keys, c.mask_key = 1;
  const bool drops = drop != Drop::kNone;
  const Array<long> key(std::vector<long>{7, 3}), samples(std::vector<long>{41});
  const uint64_t hi = drop == Drop::kApart ? 41 : ~uint64_t(0);
  if (drop == Drop::kApart) c.key = key.get(), c.samples = samples.get(), c.draw_rows = 1;
  c.draw_begin = drop == Drop::kApart ? 5 : 8, c.draw_batch = -1;  // there is one
  c.draw_query = drop == Drop::kApart ? keys + keys % 2 + 1 : (keys + 3) / 4 * 4;
  c.draw_head = queries * c.draw_query;
  if (drops) c.threshold = 0x50000000, c.kept = 1.5;
  // What a weight is multiplied by.
  const auto times = [&](int64_t h, int64_t i, int64_t j) {
    if (!drops) return 1.0;
    const uint64_t at = uint64_t(c.draw_begin + h * c.draw_head + i * c.draw_query + j);
    return philox4x32(stream_key(7, 3), hi, at / 4).v[at % 4] < c.threshold ? 0.0 : c.kept;
  };
  const KernelText text{attention_family(shape),
                        {attention_instance(t, shape, mask != Mask::kNone, drops)}};
  auto run = [&](const char* entry, AttentionEntry e, int64_t positions) {
    d.launch(d.function(text, text.instances[0].name + entry),
             attention_geometry(e, t, shape, heads, positions, drops), c);
  };
  run("_forward", AttentionEntry::kForward, queries);
  run("_delta", AttentionEntry::kDelta, queries);
  run("_queries", AttentionEntry::kQueries, queries);
  run("_keys", AttentionEntry::kKeys, keys);
  const auto y = out.read(), rq = gq.read(), rk = gk.read(), rv = gv.read();
  const auto rl = lse.read();
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
        total += p[size_t(j)] = std::exp(s * scale + double(adds[place(h, i, j)]));
      }
      if (total == 0) {
        ASSERT_TRUE(mask > Mask::kKeys && (i == blank || causal)) << i;
        ASSERT_EQ(double(rl[size_t(h * queries + i)]), INFINITY);
        total = 1;
      }
      for (int64_t l = 0; l < values; ++l) {
        double sum = 0;
        for (int64_t j = 0; j < n; ++j)
          if (p[size_t(j)] != 0) sum += p[size_t(j)] / total * times(h, i, j) * at(v, j, values, l);
        ASSERT_NEAR(at(y, i, values, l), sum, tolerance) << i << ' ' << l;
      }
      for (int64_t j = 0; j < n; ++j) {
        p[size_t(j)] /= total;
        if (p[size_t(j)] == 0) continue;
        for (int64_t l = 0; l < values; ++l) {
          dp[size_t(j)] += times(h, i, j) * at(g, i, values, l) * at(v, j, values, l);
          sv[size_t(j * values + l)] += p[size_t(j)] * times(h, i, j) * at(g, i, values, l);
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
    const int64_t checked = skips && shape.units ? hidden : keys;  // rows of a block are kept whole
    for (int64_t j = 0; j < checked; ++j) {
      for (int64_t l = 0; l < width; ++l)
        ASSERT_NEAR(at(rk, j, width, l), sk[size_t(j * width + l)], 5 * tolerance);
      for (int64_t l = 0; l < values; ++l)
        ASSERT_NEAR(at(rv, j, values, l), sv[size_t(j * values + l)], 5 * tolerance);
    }
  }
}

TEST_F(Attention, ForwardAndBackward) {
  check_attention<float>(kF32, {64, 64}, false, 2e-6);
  check_attention<float>(kF32, {64, 64}, true, 2e-6);
}
TEST_F(Attention, OtherTypes) { check_attention<double>(kF64, {64, 32}, false, 1e-13); }
TEST_F(Attention, SmallTiles) {
  check_attention<float>(kF32, {128, 32}, true, 2e-6);
  check_attention<double>(kF64, {128, 16}, true, 1e-13);
}

TEST_F(Attention, MatrixUnits) {
  const AttentionShape narrow{64, 64, true}, wide{128, 32, true};
  check_attention<fn::BF16>(kBF16, narrow, true, 0.02);
  check_attention<fn::BF16>(kBF16, narrow, false, 0.02);
  check_attention<fn::BF16>(kBF16, wide, false, 0.02, 75);
  constexpr unsigned kAll =
      kPacksQ | kPacksK | kPacksV | kPacksG | kPacksOut | kPacksDq | kPacksDk | kPacksDv;
  check_attention<fn::BF16>(kBF16, narrow, true, 0.02, 64, kAll);
  check_attention<fn::BF16>(kBF16, wide, true, 0.02, 72, kAll);
  check_attention<fn::BF16>(kBF16, narrow, false, 0.02, 24, kPacksK | kPacksG | kPacksDv);
}

TEST_F(Attention, Masks) {
  const AttentionShape narrow{64, 64, true}, wide{128, 32, true};
  check_attention<float>(kF32, {64, 64}, true, 2e-6, 20, 0, Mask::kScores);
  check_attention<float>(kF32, {128, 32}, false, 2e-6, 20, 0, Mask::kKeys);
  check_attention<double>(kF64, {64, 32}, false, 1e-13, 20, 0, Mask::kNumbers);
  check_attention<fn::BF16>(kBF16, narrow, true, 0.02, 20, 0, Mask::kNumbers);
  check_attention<fn::BF16>(kBF16, wide, false, 0.02, 75, 0, Mask::kKeys);
  check_attention<fn::BF16>(kBF16, wide, false, 0.02, 75, 0, Mask::kScores);
}

TEST_F(Attention, Dropout) {
  const AttentionShape narrow{64, 64, true}, wide{128, 32, true};
  for (const Drop drop : {Drop::kAligned, Drop::kApart}) {
    check_attention<float>(kF32, {64, 64}, true, 4e-6, 20, 0, Mask::kNone, drop);
    check_attention<float>(kF32, {128, 32}, false, 4e-6, 20, 0, Mask::kKeys, drop);
    check_attention<double>(kF64, {64, 32}, false, 2e-13, 20, 0, Mask::kNumbers, drop);
    check_attention<double>(kF64, {128, 16}, true, 2e-13, 20, 0, Mask::kNone, drop);
    check_attention<fn::BF16>(kBF16, narrow, true, 0.03, 20, 0, Mask::kNone, drop);
    check_attention<fn::BF16>(kBF16, narrow, false, 0.03, 20, 0, Mask::kNumbers, drop);
    check_attention<fn::BF16>(kBF16, wide, false, 0.03, 75, 0, Mask::kKeys, drop);
    check_attention<fn::BF16>(kBF16, wide, true, 0.03, 72, kPacksQ | kPacksK, Mask::kNone, drop);
  }
}

constexpr AttentionEntry kEntries[] = {AttentionEntry::kForward, AttentionEntry::kDelta,
                                       AttentionEntry::kQueries, AttentionEntry::kKeys};

// What cards have for a block: 227 KiB on sm_90, 163 KiB on sm_80, 99 KiB on sm_86, 89 and 120.
TEST(AttentionShapes, FitTheSharedMemoryOfTheCard) {
  for (const size_t kib : {99, 163, 227})
    for (DType t : {kF16, kBF16, kF32, kF64})
      for (int64_t width : {1, 64, 65, 128}) {
        const auto shape = attention_shape(t, width, kib << 10);
        ASSERT_TRUE(shape.has_value()) << kib << ' ' << name_of(t) << ' ' << width;
        EXPECT_GE(shape->head, width);
        for (AttentionEntry e : kEntries)
          EXPECT_LE(attention_geometry(e, t, *shape, 1, 1, true).shared_bytes, kib << 10);
      }
  EXPECT_EQ(attention_shape(kF32, 128, 227 << 10)->tile, 64);
  EXPECT_EQ(attention_shape(kF32, 128, 99 << 10)->tile, 32);
  EXPECT_FALSE(attention_shape(kF32, 129, 227 << 10).has_value());
}

// A grid has 65,535 blocks along y and z.
TEST(AttentionShapes, ManyHeadsGoAlongX) {
  for (AttentionEntry e : kEntries) {
    const Geometry g = attention_geometry(e, kF32, {64, 64}, 70000, 130, false);
    EXPECT_EQ(g.grid[0], e == AttentionEntry::kDelta ? 70000u * 17 : 70000u * 3);
    EXPECT_EQ(g.grid[1], 1u);
    EXPECT_EQ(g.grid[2], 1u);
  }
}

}  // namespace
}  // namespace tessera::cuda::test
