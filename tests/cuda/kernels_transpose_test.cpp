// transpose.cu: copies between layouts, compared element by element, in memory whose other elements
// have to stay as they are.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/backend/cuda/kernels/transpose.h"
#include "tests/cuda/kernels_device.h"

namespace tessera::cuda::test {
namespace {

class Transpose : public KernelTest {};

// `words`: whether lines of the operand and of the result begin at multiples of 4 bytes, where
// elements have 2 bytes and where they have one.
struct Layout {
  std::vector<int64_t> extents, out, in;
  int64_t out_first, in_first;
  bool in_words_2, out_words_2, in_words_1, out_words_1;
};

struct Places {
  std::vector<size_t> out, in;
  size_t out_size = 0, in_size = 0;
};
Places places_of(const Layout& l) {
  Places p;
  std::vector<int64_t> at(l.extents.size(), 0);
  for (;;) {
    int64_t to = l.out_first, from = l.in_first;
    for (size_t d = 0; d < at.size(); ++d) to += at[d] * l.out[d], from += at[d] * l.in[d];
    p.out.push_back(size_t(to)), p.in.push_back(size_t(from));
    size_t d = at.size();
    while (d > 0 && ++at[d - 1] == l.extents[d - 1]) at[--d] = 0;
    if (d == 0) break;
  }
  p.out_size = *std::max_element(p.out.begin(), p.out.end()) + 9;
  p.in_size = *std::max_element(p.in.begin(), p.in.end()) + 1;
  return p;
}

template <class T>
void expect_copied(const Layout& l) {
  const KernelText text{"transpose", {transpose_instance(sizeof(T))}};
  const Places places = places_of(l);
  std::vector<T> x(places.in_size), expected(places.out_size, T(0x5a));
  for (size_t i = 0; i < x.size(); ++i) x[i] = T(i * 2654435761u >> 3);
  for (size_t i = 0; i < places.in.size(); ++i) expected[places.out[i]] = x[places.in[i]];
  Array<T> in(x), out(std::vector<T>(places.out_size, T(0x5a)));
  const auto launches =
      transpose_launches(l.extents, {out.get() + l.out_first, int(sizeof(T)), l.out},
                         {in.get() + l.in_first, int(sizeof(T)), l.in});
  ASSERT_EQ(launches.size(), 1u);
  const TransposeCall& c = launches[0].call;
  EXPECT_EQ(bool(c.in_words), sizeof(T) == 2 ? l.in_words_2 : sizeof(T) > 2 || l.in_words_1);
  EXPECT_EQ(bool(c.out_words), sizeof(T) == 2 ? l.out_words_2 : sizeof(T) > 2 || l.out_words_1);
  Device& d = *Device::get();
  d.launch(d.function(text, transpose_instance(sizeof(T)).name + "_tiles"), launches[0].geometry,
           c);
  EXPECT_EQ(out.read(), expected) << sizeof(T) << " bytes, " << l.extents.back() << " columns";
}

TEST_F(Transpose, CopiesByTiles) {
  const Layout layouts[] = {
      // Whole tiles of every width, many of them.
      {{256, 384}, {384, 1}, {1, 256}, 0, 0, true, true, true, true},
      // Neither extent is one of tiles or words.
      {{70, 131}, {131, 1}, {1, 70}, 0, 0, true, false, false, false},
      {{133, 66}, {66, 1}, {1, 133}, 0, 0, false, true, false, false},
      {{17, 16}, {16, 1}, {1, 17}, 0, 0, false, true, false, true},
      // Lines that end within a word but begin at one.
      {{67, 130}, {132, 1}, {1, 68}, 4, 8, true, true, true, true},
      // Offsets that no word begins at, and words of 2 elements but not of 4.
      {{64, 128}, {128, 1}, {1, 64}, 1, 0, true, false, true, false},
      {{64, 128}, {128, 1}, {1, 64}, 0, 3, false, true, false, true},
      {{64, 128}, {128, 1}, {1, 64}, 2, 2, true, true, false, false},
      // A batch outside, two of them, and one whose dims lie between and inside.
      {{3, 65, 33}, {2145, 33, 1}, {2145, 1, 65}, 0, 0, false, false, false, false},
      {{2, 3, 64, 36}, {10000, 2304, 36, 1}, {8000, 2500, 1, 64}, 0, 0, true, true, true, true},
      {{2, 40, 3, 50}, {6000, 150, 50, 1}, {6000, 1, 2000, 40}, 0, 0, true, true, true, false},
      {{2, 3, 64, 36}, {9999, 2304, 36, 1}, {8001, 2500, 1, 64}, 0, 0, false, false, false, false},
      // Columns that are read backwards.
      {{64, 36}, {36, 1}, {1, -64}, 0, 35 * 64, true, true, true, true}};
  for (const Layout& l : layouts) {
    expect_copied<uint8_t>(l);
    expect_copied<uint16_t>(l);
    expect_copied<uint32_t>(l);
    expect_copied<uint64_t>(l);
  }
}

// Nests that are walked as they are: the same dim is dense, none is, or tiles would be empty.
TEST_F(Transpose, OtherLayoutsDoNotGoByTiles) {
  char memory[4];
  const auto launches = [&](std::vector<int64_t> extents, std::vector<int64_t> out,
                            std::vector<int64_t> in) {
    return transpose_launches(extents, {memory, 4, out}, {memory, 4, in}).size();
  };
  EXPECT_EQ(launches({64, 48}, {48, 1}, {1, 64}), 1u);
  EXPECT_EQ(launches({64, 48}, {48, 1}, {50, 1}), 0u);
  EXPECT_EQ(launches({64, 48}, {48, 1}, {2, 128}), 0u);
  EXPECT_EQ(launches({64, 48}, {96, 2}, {1, 64}), 0u);
  EXPECT_EQ(launches({64, 48}, {48, 1}, {1, 0}), 0u);
  EXPECT_EQ(launches({3, 48}, {48, 1}, {1, 3}), 0u);
  EXPECT_EQ(launches({64, 3}, {3, 1}, {1, 64}), 0u);
  EXPECT_EQ(launches({0, 48}, {48, 1}, {1, 64}), 0u);
}

// A matrix and a batch of which 31 bits do not count the elements.
TEST_F(Transpose, LargeCopies) {
  const int64_t side = int64_t(1) << 17, all = side * side, tiles = side / 64;
  const auto* none = reinterpret_cast<const char*>(uintptr_t(1) << 40);  // nothing is there
  const std::vector<int64_t> extents{5, side, side}, out{all, side, 1}, in{all, 1, side};
  int64_t next = 0, count = 0;
  for (const TransposeLaunch& l : transpose_launches(extents, {none, 2, out}, {none, 2, in})) {
    const TransposeCall& c = l.call;
    EXPECT_EQ(static_cast<const char*>(c.out) - none, next * 2);
    EXPECT_EQ(static_cast<const char*>(c.in) - none, next * 2);
    EXPECT_EQ(c.in_column, side);
    EXPECT_EQ(c.rows, side);
    EXPECT_EQ(l.geometry.grid[0], c.batch.count * tiles * tiles);
    count += c.batch.count, next += c.batch.count * all;
  }
  EXPECT_EQ(count, 5);
}

}  // namespace
}  // namespace tessera::cuda::test
