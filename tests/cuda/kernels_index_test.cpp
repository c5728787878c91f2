// indexing.cu, segments.cu and sort.cu: results are exact, so they are compared element by element,
// with the order of sums that the CPU's kernels have.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "core/backend/cuda/kernels/indexing.h"
#include "core/backend/cuda/refusals.h"
#include "tests/cuda/kernels_device.h"

namespace tessera::cuda::test {
namespace {

class Indexing : public KernelTest {};

std::vector<float> numbers(size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> x(n);
  for (float& v : x) v = float(int(random() % 2001) - 1000) * 1e-3f;
  return x;
}

// Sorts lines and returns positions [outer, kept, inner], and values too.
template <class T>
std::pair<std::vector<T>, std::vector<long>> sorted(DType t, bool down, const std::vector<T>& x,
                                                    int64_t outer, int64_t n, int64_t inner,
                                                    int64_t kept) {
  Device& d = *Device::get();
  const KernelText text{"sort", {sort_instance(down, t)}};
  const std::string name = text.instances[0].name + "_";
  const SortLaunches all = sort_launches(outer, n, inner);
  Array<T> in(x), keys0(x.size()), keys1(x.size()), values(size_t(outer * kept * inner));
  Array<int> places0(x.size()), places1(x.size());
  Array<long> positions(values.size());
  for (const SortLaunch& l : all.launches) {
    SortCall c = l.call;
    c.in = in.get();
    const bool blocks = std::string(l.entry) == "blocks";
    const bool from_first = blocks || l.from == 0;
    c.keys = from_first ? keys0.get() : keys1.get(),
    c.places = from_first ? places0.get() : places1.get();
    c.to_keys = from_first ? keys1.get() : keys0.get();
    c.to_places = from_first ? places1.get() : places0.get();
    d.launch(d.function(text, name + l.entry), l.geometry, c);
  }
  SortCall c{};
  c.in = in.get(), c.places = all.result ? places1.get() : places0.get(), c.values = values.get();
  c.positions = positions.get(), c.outer = unsigned(outer), c.n = unsigned(n),
  c.inner = unsigned(inner);
  c.kept = unsigned(kept), c.count = unsigned(outer * kept * inner);
  d.launch(d.function(text, name + "finish"), cover(c.count, 256), c);
  return {values.read(), positions.read()};
}

TEST_F(Indexing, SortsAreStableAndNanIsLargest) {
  for (const bool down : {false, true})
    for (const auto& [outer, n, inner, kept] :
         {std::array<int64_t, 4>{3, 37, 1, 37}, {2, 50, 3, 10}, {1, 4500, 1, 4500}}) {
      std::mt19937 random(4);
      std::vector<float> x(size_t(outer * n * inner));
      for (float& v : x) v = float(random() % 40) - 20;
      x[5] = std::numeric_limits<float>::quiet_NaN(), x[17] = x[5];
      const auto [values, positions] = sorted(kF32, down, x, outer, n, inner, kept);
      for (int64_t o = 0; o < outer; ++o)
        for (int64_t i = 0; i < inner; ++i) {
          std::vector<long> order(static_cast<size_t>(n));
          std::iota(order.begin(), order.end(), 0L);
          auto key = [&](long k) {
            const float v = x[size_t((o * n + k) * inner + i)];
            return std::isnan(v) ? 1e30f : v;
          };
          std::stable_sort(order.begin(), order.end(), [&](long a, long b) {
            return down ? key(a) > key(b) : key(a) < key(b);
          });
          for (int64_t k = 0; k < kept; ++k) {
            const size_t at = size_t((o * kept + k) * inner + i);
            ASSERT_EQ(positions[at], order[size_t(k)]) << n << ' ' << k << ' ' << down;
            const float v = x[size_t((o * n + order[size_t(k)]) * inner + i)];
            ASSERT_TRUE(values[at] == v || (v != v && values[at] != values[at]));
          }
        }
    }
}

TEST_F(Indexing, SearchesSortedRows) {
  const KernelText text{"sort", {sort_instance(false, kF32)}};
  Array<float> rows(std::vector<float>{0, 1, 1, 3, -2, 0, 5, 9}),
      values(std::vector<float>{1, 4, 0, 9});
  Array<long> out(4);
  SortCall c{};
  c.in = rows.get(), c.values = values.get(), c.positions = out.get();
  c.outer = 2, c.n = 4, c.inner = 2, c.count = 4;
  d().launch(d().function(text, "sort_up_f32_search"), cover(4, 256), c);
  EXPECT_EQ(out.read(), (std::vector<long>{1, 4, 1, 3}));
  c.right = 1;
  d().launch(d().function(text, "sort_up_f32_search"), cover(4, 256), c);
  EXPECT_EQ(out.read(), (std::vector<long>{3, 4, 2, 4}));
}

TEST_F(Indexing, GathersAndScatters) {
  const KernelText text{"indexing", {indexing_instance(4, kI64), indexing_instance(16, kI32)}};
  const auto x = numbers(3 * 7 * 4, 1);
  const std::vector<long> full = [&] {
    std::vector<long> v(3 * 5 * 4);
    for (size_t i = 0; i < v.size(); ++i) v[i] = long(i * 5) % 7;
    return v;
  }();
  Array<float> in(x), out(60), table(84);
  Array<long> index(full);
  Array<Report> report(1);
  report.fill(0);
  IndexCall c{};
  c.in = in.get(), c.index = index.get(), c.out = out.get(), c.report = report.get();
  c.rows = c.extent = 7, c.inner = make_divisor(4), c.n = make_divisor(5), c.count = 60;
  d().launch(d().function(text, "index_4_i64_gather"), cover(60, 256), c);
  const auto got = out.read();
  for (size_t e = 0; e < 60; ++e)
    ASSERT_EQ(got[e], x[(e / 20 * 7 + size_t(full[e])) * 4 + e % 4]) << e;

  // Rows of 16 bytes by a vector index, of which a part of the table is here.
  const std::vector<int> ids{6, 2, 9, 3};
  Array<int> vector(ids);
  Array<float> rows(16);
  c.index = vector.get(), c.out = rows.get(), c.vector = 1, c.index_stride = 1, c.begin = 2,
  c.rows = 5;
  c.extent = 10, c.inner = make_divisor(1), c.n = make_divisor(4), c.count = 4;
  d().launch(d().function(text, "index_16_i32_gather"), cover(4, 256), c);
  const auto taken = rows.read();
  for (size_t i = 0; i < 16; ++i)
    ASSERT_EQ(taken[i], ids[i / 4] < 7 ? x[size_t(ids[i / 4] - 2) * 4 + i % 4] : 0) << i;
  EXPECT_EQ(report.read()[0], 0u);

  // Scatter: the last along the index wins; a bad index is reported.
  Array<unsigned> winner(84);
  winner.fill(0), table.fill(0);
  Array<float> src(numbers(60, 3));
  const auto values = numbers(60, 3);
  auto bad = full;
  bad[31] = 7, bad[33] = -1;
  Array<long> places(bad);
  IndexCall s{};
  s.in = src.get(), s.index = places.get(), s.out = table.get(), s.winner = winner.get();
  s.report = report.get(), s.rows = s.extent = 7, s.inner = make_divisor(4), s.n = make_divisor(5);
  s.count = 60;
  d().launch(d().function(text, "index_4_i64_claim"), cover(60, 256), s);
  d().launch(d().function(text, "index_4_i64_scatter"), cover(60, 256), s);
  std::vector<float> expected(84, 0.0f);
  for (size_t o = 0; o < 3; ++o)
    for (size_t k = 0; k < 5; ++k)
      for (size_t i = 0; i < 4; ++i) {
        const size_t e = (o * 5 + k) * 4 + i;
        if (bad[e] >= 0 && bad[e] < 7) expected[(o * 7 + size_t(bad[e])) * 4 + i] = values[e];
      }
  EXPECT_EQ(table.read(), expected);
  EXPECT_EQ(refused_of(report.read()[0]).position, 31);
  EXPECT_EQ(refused_of(report.read()[0]).value, 7);
}

// Lines behind a vector's dim come in the widest elements that their addresses and extent allow.
TEST_F(Indexing, LinesOfAVectorAreWidened) {
  const KernelText text{
      "indexing",
      {indexing_instance(4, kI64), indexing_instance(8, kI64), indexing_instance(16, kI64)}};
  const std::vector<long> ids{6, 0, 9, 3, 3};
  Array<long> index(ids);
  struct Case {
    size_t inner, shift;
    int bytes;
  };
  for (const Case& k : {Case{12, 0, 16}, Case{6, 0, 8}, Case{5, 0, 4}, Case{12, 2, 8},
                        Case{12, 1, 4}, Case{520, 0, 16}}) {
    const auto x = numbers(2 * 7 * k.inner + k.shift, 1);
    Array<float> in(x), out(2 * 5 * k.inner + 8);
    out.fill(0);
    Array<Report> report(1);
    report.fill(0);
    IndexCall c{};
    c.in = in.get() + k.shift, c.index = index.get(), c.out = out.get(), c.report = report.get();
    c.rows = c.extent = 7, c.inner = make_divisor(uint32_t(k.inner)), c.n = make_divisor(5);
    c.count = unsigned(2 * 5 * k.inner), c.vector = 1, c.index_stride = 1;
    const int bytes = widen_lines(c, 4);
    ASSERT_EQ(bytes, k.bytes);
    EXPECT_EQ(c.count * unsigned(bytes), 2 * 5 * k.inner * sizeof(float));
    d().launch(d().function(text, indexing_instance(bytes, kI64).name + "_gather"),
               cover(c.count, 256), c);
    std::vector<float> expected(2 * 5 * k.inner + 8, 0.0f);
    for (size_t e = 0; e < 2 * 5 * k.inner; ++e)
      if (const long id = ids[e / k.inner % 5]; id < 7)
        expected[e] = x[k.shift + (e / k.inner / 5 * 7 + size_t(id)) * k.inner + e % k.inner];
    EXPECT_EQ(out.read(), expected) << k.inner << ' ' << k.shift;
    EXPECT_EQ(refused_of(report.read()[0]).position, 2);
    EXPECT_EQ(refused_of(report.read()[0]).value, 9);
  }
}

TEST_F(Indexing, SumsOfWhatAnIndexBringsTogether) {
  const size_t n = 3000, rows = 50, inner = 5;
  std::vector<long> ids(n);
  for (size_t i = 0; i < n; ++i) ids[i] = long(i * i) % long(rows);
  const auto g = numbers(n * inner, 8);
  const auto [keys, order] = sorted(kI64, false, ids, 1, int64_t(n), 1, int64_t(n));
  std::vector<int> places(order.begin(), order.end());
  const KernelText text{"segments", {segments_instance("sum", kF32, kF32)}};
  Array<float> in(g), out(rows * inner);
  Array<long> dk(keys);
  Array<int> dp(places);
  Array<Report> report(1);
  report.fill(0), out.fill(0);
  SegmentCall c{};
  c.in = in.get(), c.out = out.get(), c.keys = dk.get(), c.order = dp.get(),
  c.report = report.get();
  c.rows = c.extent = long(rows), c.ignored = 4, c.inner = make_divisor(inner),
  c.n = make_divisor(n);
  c.count = unsigned(n * inner);
  d().launch(d().function(text, "scatter_sum_f32_f32_segments"), cover(c.count, 256), c);
  std::vector<float> expected(rows * inner, 0.0f);
  for (size_t k = 0; k < n; ++k)
    for (size_t i = 0; i < inner; ++i)
      if (ids[k] != 4) expected[size_t(ids[k]) * inner + i] += g[k * inner + i];
  EXPECT_EQ(out.read(), expected);  // the CPU's order, so its bits

  std::vector<long> index(2 * 40 * 3);
  for (size_t i = 0; i < index.size(); ++i) index[i] = long(i * 11) % 6;
  const auto x = numbers(index.size(), 2);
  Array<float> from(x), to(2 * 6 * 3);
  Array<long> di(index);
  to.fill(0);
  SegmentCall l{};
  l.in = from.get(), l.out = to.get(), l.keys = di.get(), l.report = report.get();
  l.rows = l.extent = 6, l.inner = make_divisor(3), l.n = make_divisor(40), l.count = 6;
  d().launch(d().function(text, "scatter_sum_f32_f32_lines"), cover(6, 256), l);
  std::vector<float> sums(36, 0.0f);
  for (size_t o = 0; o < 2; ++o)
    for (size_t k = 0; k < 40; ++k)
      for (size_t i = 0; i < 3; ++i) {
        const size_t e = (o * 40 + k) * 3 + i;
        sums[(o * 6 + size_t(index[e])) * 3 + i] += x[e];
      }
  EXPECT_EQ(to.read(), sums);
  EXPECT_EQ(report.read()[0], 0u);
}

// Rows of three packs, of which the first and the last segment have the ends of the index; what was
// there before counts where it is not fresh.
template <class T>
void check_segment_packs(DType t, bool fresh) {
  Device& d = *Device::get();
  const size_t n = 301, rows = 20, pack = 16 / sizeof(T), inner = 3 * pack;
  std::vector<long> ids(n);
  for (size_t i = 0; i < n; ++i) ids[i] = long(i * i + i / 7) % long(rows + 2);
  const auto [keys, order] = sorted(kI64, false, ids, 1, int64_t(n), 1, int64_t(n));
  std::vector<int> places(order.begin(), order.end());
  std::vector<T> g(n * inner), before(rows * inner);
  for (size_t i = 0; i < g.size(); ++i) g[i] = T(long(i * 31 % 17) - 8);
  for (size_t i = 0; i < before.size(); ++i) before[i] = T(fresh ? 0 : long(i % 5));
  const KernelText text{"segments", {segments_instance("sum", t, t)}};
  Array<T> in(g), out(before);
  Array<long> dk(keys);
  Array<int> dp(places);
  Array<Report> report(1);
  report.fill(0);
  const void* addresses[] = {in.get(), out.get()};
  ASSERT_EQ(segment_pack(t, t, int64_t(inner), addresses), int(pack));
  ASSERT_EQ(segment_pack(t, t, int64_t(inner) + 1, addresses), 1);
  addresses[1] = out.get() + 1;
  ASSERT_EQ(segment_pack(t, t, int64_t(inner), addresses), 1);
  SegmentCall c{};
  c.in = in.get(), c.out = out.get(), c.keys = dk.get(), c.order = dp.get();
  c.report = report.get(), c.begin = 1, c.rows = long(rows), c.extent = long(rows) + 2;
  c.ignored = 4, c.fresh = fresh;
  c.inner = make_divisor(3), c.n = make_divisor(n), c.count = unsigned(n * 3);
  const std::string name = text.instances[0].name + "_segment_packs";
  d.launch(d.function(text, name), cover(c.count, 256), c);
  for (size_t k = 0; k < n; ++k)
    for (size_t i = 0; i < inner; ++i)
      if (ids[k] != 4 && ids[k] >= 1 && ids[k] <= long(rows))
        before[size_t(ids[k] - 1) * inner + i] += g[k * inner + i];
  EXPECT_EQ(out.read(), before);
  EXPECT_EQ(report.read()[0], 0u);
  c.extent = 15;  // the first of the places of an id that is too large
  d.launch(d.function(text, name), cover(c.count, 256), c);
  size_t first = 0;
  while (ids[first] < 15) ++first;
  EXPECT_EQ(refused_of(report.read()[0]).position, long(first));
}
TEST_F(Indexing, SumsPacksOfWhatAnIndexBringsTogether) {
  for (const bool fresh : {true, false}) {
    check_segment_packs<float>(kF32, fresh);
    check_segment_packs<double>(kF64, fresh);
    check_segment_packs<int>(kI32, fresh);
    check_segment_packs<unsigned char>(kU8, fresh);
  }
}

}  // namespace
}  // namespace tessera::cuda::test
