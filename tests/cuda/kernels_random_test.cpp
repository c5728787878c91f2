// random.cu, dropout.cu, arange.cu and update.cu: the bits of the host's functions for the same
// key, and the host's formulas for steps and norms.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "core/backend/cuda/kernels/random.h"
#include "core/tensor/philox.h"
#include "tests/cuda/kernels_device.h"
// Each text needs the one before it.
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/math.h"
#include "core/ops/functors/math_trig.h"
#include "core/ops/functors/convert.h"
// clang-format on

namespace tessera::cuda::test {
namespace {

class Random : public KernelTest {};
class Update : public KernelTest {};

constexpr long kKey[2] = {42, 7};
uint64_t stream_key() {
  return low64(philox4x32(uint64_t(kKey[0]), 0x7465737365726121ull, uint64_t(kKey[1])));
}
uint32_t word(uint64_t hi, uint64_t e) { return philox4x32(stream_key(), hi, e / 4).v[e % 4]; }

// A part [4, 6] at (2, 3) of a tensor of 16 columns.
Walk part() {
  const int64_t extents[] = {4, 6}, strides[] = {16, 1};
  const Strided operand{nullptr, 1, strides};
  return make_walks(extents, {&operand, 1})[0].walk;
}
constexpr long kFirst = 2 * 16 + 3;
uint64_t index_of(size_t e) { return uint64_t(kFirst) + e / 6 * 16 + e % 6; }

TEST_F(Random, DrawsHaveTheBitsOfTheHost) {
  const KernelText text{"random",
                        {random_instance("rand", kF32), random_instance("randn", kF32),
                         random_instance("rand", kBF16), random_instance("rand", kF64),
                         random_instance("randint", kI64)}};
  Array<long> key{std::span<const long>(kKey)};
  RandomCall c{};
  c.key = key.get(), c.first = kFirst, c.low = -5, c.range = 1000, c.place = part();
  c.total = c.place.count;
  auto run = [&](const char* name, auto zero) {
    Array<decltype(zero)> out(24);
    c.out = out.get();
    d().launch(d().function(text, name), cover(24, 256), c);
    return out.read();
  };
  const auto uniform = run("rand_f32_random", float());
  const auto normal = run("randn_f32_random", float());
  const auto narrow = run("rand_bf16_random", uint16_t());
  const auto wide = run("rand_f64_random", double());
  const auto integers = run("randint_i64_random", long());
  for (size_t i = 0; i < 24; ++i) {
    const uint64_t e = index_of(i);
    const float u = uniform_float(word(0, e));
    EXPECT_EQ(uniform[i], u);
    EXPECT_EQ(narrow[i], uint16_t(std::bit_cast<uint32_t>(u) >> 16));
    const uint64_t even = e & ~uint64_t(1);
    const float r = fn::sqrt(-2.0f * fn::log((float(word(3, even) >> 8) + 1.0f) * 0x1p-24f));
    const float angle = float(word(3, even + 1) >> 8) * (0x1p-24f * 6.283185307f);
    EXPECT_EQ(normal[i], r * (e % 2 ? fn::sin(angle) : fn::cos(angle)));
    const Philox4 p = philox4x32(stream_key(), 1, e / 2);
    const uint64_t bits = uint64_t(p.v[2 * (e % 2) + 1]) << 32 | p.v[2 * (e % 2)];
    EXPECT_EQ(wide[i], double(bits >> 11) * 0x1p-53);
    const uint64_t x = low64(philox4x32(stream_key(), 4, e));
    EXPECT_EQ(integers[i], -5 + int64_t((unsigned __int128)(x)*1000 >> 64));
  }
}

TEST_F(Random, DropoutDropsWhatTheHostDrops) {
  const KernelText text{"dropout", {dropout_instance(kF32)}};
  Array<long> key{std::span<const long>(kKey)}, samples(std::vector<long>{11, 3});
  std::vector<float> x(48);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(i) + 1;
  Array<float> in(x), out(48);
  out.fill(0);
  RandomCall c{};
  c.key = key.get(), c.in = in.get(), c.out = out.get(), c.first = kFirst, c.place = part();
  c.scale = 1 / (1 - 0.3), c.threshold = uint32_t(0.3 * 4294967296.0), c.total = 24;
  d().launch(d().function(text, "dropout_f32_dropout"), cover(24, 256), c);
  auto got = out.read();
  size_t dropped = 0;
  for (size_t i = 0; i < 24; ++i) {
    const bool drop = word(~uint64_t(0), index_of(i)) < c.threshold;
    dropped += drop;
    EXPECT_EQ(got[i], drop ? 0.0f : x[i] * float(c.scale));
  }
  EXPECT_GT(dropped, 0u);
  c.samples = samples.get(), c.total = 48;
  d().launch(d().function(text, "dropout_f32_dropout"), cover(48, 256), c);
  got = out.read();
  for (size_t i = 0; i < 48; ++i)
    EXPECT_EQ(got[i] == 0, word(i < 24 ? 11 : 3, index_of(i % 24)) < c.threshold) << i;
}

// Parts of a tensor as packs draw them: a whole one that ends within a pack, one that begins at a
// pack of the whole, and rows that begin at packs. Where that does not hold, there are no packs.
struct Part {
  std::vector<int64_t> extents, strides;
  int64_t first;
  bool packs;
};
const Part kParts[] = {{{9003}, {1}, 0, true},         {{3, 35}, {35, 1}, 40, true},
                       {{5, 16}, {40, 1}, 8, true},    {{3, 2, 24}, {640, 80, 1}, 48, true},
                       {{5, 16}, {40, 1}, 9, false},   {{5, 16}, {41, 1}, 8, false},
                       {{5, 15}, {40, 1}, 8, false},   {{20}, {1}, 1, false},
                       {{2, 16}, {8192, 2}, 8, false}, {{1}, {1}, 0, true}};

// What an instance draws for a part, and behind it bytes that it must leave as they are.
template <class Launch>
std::vector<unsigned char> drawn(const Part& part, int width, size_t element_bytes, Launch launch) {
  int64_t count = 1;
  for (int64_t e : part.extents) count *= e;
  const DrawPlaces all = draw_places(part.extents, part.strides, part.first, width, true);
  EXPECT_EQ(all.width, part.packs ? width : 1);
  EXPECT_EQ(all.pieces.size(), 1u);
  Array<unsigned char> out(size_t(count) * element_bytes + 32);
  out.fill(0xab);
  RandomCall c{};
  c.out = out.get(), c.first = part.first + all.pieces[0].begin[0];
  c.place = all.pieces[0].walk, c.total = unsigned(count);
  launch(c, all.width > 1, draw_geometry(c.place.count, all.width));
  return out.read();
}

TEST_F(Random, PacksHaveTheBitsOfSingleElements) {
  KernelText text{"random", {}};
  for (DType t : {kF32, kBF16, kF16})
    for (const char* kind : {"rand", "randn"}) text.instances.push_back(random_instance(kind, t));
  Array<long> key{std::span<const long>(kKey)};
  for (DType t : {kF32, kBF16, kF16})
    for (const std::string kind : {"rand", "randn"})
      for (const Part& part : kParts) {
        const auto launch = [&](RandomCall c, bool packs, const Geometry& g) {
          c.key = key.get();
          const std::string name = random_instance(kind, t).name + (packs ? "_packs" : "_random");
          d().launch(d().function(text, name), g, c);
        };
        Part single = part;
        single.packs = false;
        const int width = draw_width(kind, t);
        EXPECT_EQ(width, t == kF32 ? 4 : 8);
        EXPECT_EQ(drawn(part, width, size_of(t), launch), drawn(single, 1, size_of(t), launch))
            << kind << ' ' << name_of(t) << " of " << part.extents.back() << " at " << part.first;
      }
  for (DType t : {kF64, kI32}) EXPECT_EQ(draw_width(t == kF64 ? "rand" : "randint", t), 1);
}

TEST_F(Random, DropoutInPacksDropsTheSameElements) {
  const KernelText text{"dropout", {dropout_instance(kF32), dropout_instance(kBF16)}};
  Array<long> key{std::span<const long>(kKey)}, samples(std::vector<long>{11, 3, 70});
  std::vector<uint32_t> ones(9003 * 3 + 8, 0x3f803f80u);  // numbers of either type
  for (size_t i = 0; i < ones.size(); ++i) ones[i] += uint32_t(i % 100) << 16 | uint32_t(i % 77);
  Array<uint32_t> in(ones);
  for (DType t : {kF32, kBF16})
    for (const Part& part : kParts)
      for (const bool by_sample : {false, true}) {
        int64_t count = 1;
        for (int64_t e : part.extents) count *= e;
        const int width = draw_width("dropout", t), groups = by_sample ? 3 : 1;
        // Samples follow each other, so that none may end within a pack.
        const bool packs = part.packs && !(by_sample && count % width != 0);
        auto run = [&](int width) {
          const DrawPlaces all =
              draw_places(part.extents, part.strides, part.first, width, !by_sample);
          EXPECT_EQ(all.width, packs ? width : 1);
          Array<unsigned char> out(size_t(count * groups) * size_of(t) + 32);
          out.fill(0xab);
          RandomCall c{};
          c.key = key.get(), c.in = in.get(), c.out = out.get(), c.place = all.pieces[0].walk;
          c.samples = by_sample ? samples.get() : nullptr;
          c.first = part.first, c.total = unsigned(count * groups);
          c.scale = 1 / (1 - 0.3), c.threshold = uint32_t(0.3 * 4294967296.0);
          const std::string name =
              dropout_instance(t).name + (all.width > 1 ? "_packs" : "_dropout");
          d().launch(d().function(text, name),
                     draw_geometry((c.total + all.width - 1) / all.width, all.width), c);
          return out.read();
        };
        EXPECT_EQ(run(width), run(1)) << name_of(t) << " of " << part.extents.back() << " at "
                                      << part.first << (by_sample ? ", by sample" : "");
      }
}

TEST_F(Random, NumbersInARow) {
  const KernelText text{"arange", {arange_instance(kI64), arange_instance(kF32)}};
  Array<long> longs(300);
  Array<float> floats(300);
  ArangeCall c{longs.get(), 0, 0, (long(1) << 60) + 1, -3, 300, 0};
  d().launch(d().function(text, "numbers_i64_arange"), cover(300, 256), c);
  EXPECT_EQ(longs.read()[299], (long(1) << 60) + 1 - 3 * 299);
  c = {floats.get(), 0.5, 0.1, 0, 0, 300, 1};
  d().launch(d().function(text, "numbers_f32_arange"), cover(300, 256), c);
  EXPECT_EQ(floats.read()[299], float(0.5 + 0.1 * 299));
}

std::vector<float> numbers(size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> x(n);
  for (float& v : x) v = float(int(random() % 2001) - 1000) * 1e-3f;
  return x;
}

// Two parameters, the first of more than one piece.
TEST_F(Update, AdamAndSgdOfSeveralTensorsInOneLaunch) {
  const KernelText text{"update", {update_instance(kF32)}};
  const int64_t counts[] = {kUpdatePiece + 100, 33};
  const auto pieces = update_pieces(counts);
  ASSERT_EQ(pieces.size(), 3u);
  std::vector<std::unique_ptr<Array<float>>> arrays;
  std::vector<std::vector<float>> host;
  std::vector<void*> lists;
  for (int list = 0; list < 7; ++list)
    for (int i = 0; i < 2; ++i) {
      host.push_back(numbers(size_t(counts[i]), unsigned(list * 2 + i)));
      if (list == 3)
        for (float& v : host.back()) v = std::abs(v);
      arrays.push_back(std::make_unique<Array<float>>(host.back()));
      lists.push_back(arrays.back()->get());
    }
  Array<UpdatePiece> dp(pieces);
  Array<void*> dl(lists);
  Array<double> scalars(std::vector<double>{1e-2, 3, 0.5, std::numeric_limits<double>::infinity()});
  UpdateCall c{};
  c.pieces = dp.get(), c.lists = dl.get(), c.lr = scalars.get(), c.step = scalars.get() + 1;
  c.scale = scalars.get() + 2, c.beta1 = 0.9, c.beta2 = 0.99, c.eps = 1e-8, c.weight_decay = 0.1;
  c.tensors = 2, c.decoupled = 1, c.if_finite = 1;
  const Geometry g{{3, 1, 1}, {256, 1, 1}, 0};
  d().launch(d().function(text, "update_f32_adam"), g, c);
  for (int i = 0; i < 2; ++i) {
    const auto p2 = arrays[size_t(8 + i)]->read(), m2 = arrays[size_t(10 + i)]->read(),
               v2 = arrays[size_t(12 + i)]->read();
    for (size_t k = 0; k < p2.size(); ++k) {
      const float grad = host[size_t(2 + i)][k] * 0.5f;
      const float m = 0.9f * host[size_t(4 + i)][k] + float(1 - 0.9) * grad;
      const float v = 0.99f * host[size_t(6 + i)][k] + float(1 - 0.99) * grad * grad;
      ASSERT_EQ(m2[k], m);
      ASSERT_EQ(v2[k], v);
      const float root = float(1 / std::sqrt(1 - std::pow(0.99, 3)));
      const float p = host[size_t(i)][k] * float(1 - 1e-2 * 0.1) -
                      float(1e-2 / (1 - std::pow(0.9, 3))) * m / (fn::sqrt(v) * root + 1e-8f);
      ASSERT_NEAR(p2[k], p, 1e-7f) << k;
    }
  }
  c.scale = scalars.get() + 3;  // infinite: nothing changes
  d().launch(d().function(text, "update_f32_adam"), g, c);
  EXPECT_EQ(arrays[8]->read(), host[0]);
  EXPECT_EQ(arrays[13]->read(), host[7]);

  c.scale = scalars.get() + 2, c.momentum = 0.9, c.nesterov = 1, c.dampening = 0.25;
  d().launch(d().function(text, "update_f32_sgd_momentum"), g, c);
  const auto p = arrays[6]->read(), b = arrays[8]->read();
  for (size_t k = 0; k < p.size(); ++k) {
    const float grad = host[2][k] * 0.5f + 0.1f * host[0][k];
    const float buffer = 0.9f * host[4][k] + 0.75f * grad;
    ASSERT_EQ(b[k], buffer);
    ASSERT_EQ(p[k], host[0][k] - 0.01f * (grad + 0.9f * buffer));
  }
}

TEST_F(Update, NormsAreBalancedTrees) {
  const KernelText text{"update", {update_instance(kF32)}};
  const auto x = numbers(700 * 3, 1);
  Array<float> in(x);
  Array<double> values(1000), out(3);
  Array<long> begin(std::vector<long>{0, 700, 700, 705});
  values.fill(0);
  NormCall c{in.get(), values.get(), out.get(), begin.get(), 700, 3, 0};
  d().launch(d().function(text, "update_f32_row_squares"), {{64, 1, 1}, {256, 1, 1}, 0}, c);
  auto squares = values.read();
  for (size_t r = 0; r < 700; ++r) {
    double s = 0;
    for (size_t k = 0; k < 3; ++k) s += double(x[r * 3 + k]) * double(x[r * 3 + k]);
    ASSERT_NEAR(squares[r], s, 1e-15);
  }
  auto tree = [&](auto self, const double* v, int64_t n) -> double {
    if (n <= 2) return n == 2 ? v[0] + v[1] : n ? v[0] : 0.0;
    const int64_t half = (n + 1) / 2;
    return self(self, v, half) + self(self, v + half, n - half);
  };
  d().launch(d().function(text, "update_f32_tree_sums"), {{3, 1, 1}, {256, 1, 1}, 0}, c);
  const auto sums = out.read();
  EXPECT_EQ(sums[0], tree(tree, squares.data(), 700));
  EXPECT_EQ(sums[1], 0);
  values.write(squares);
  c.n = 700, c.rows = 0;
  d().launch(d().function(text, "update_f32_norm"), {{1, 1, 1}, {256, 1, 1}, 0}, c);
  EXPECT_EQ(out.read()[0], std::sqrt(tree(tree, squares.data(), 700)));
}

}  // namespace
}  // namespace tessera::cuda::test
