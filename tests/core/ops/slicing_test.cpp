// x.index({..}) as Python writes it: against loops over the positions that the entries name.
#include <gtest/gtest.h>

#include "core/autograd/autograd.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

// Element [i, j, k] is 100 i + 10 j + k, so values name their places.
Tensor places(int64_t a, int64_t b, int64_t c) {
  return unsqueeze(unsqueeze(arange(a) * 100, 1) + arange(b) * 10, 2) + arange(c);
}
void expect_values(const Tensor& got, const Shape& shape, std::vector<int64_t> values) {
  ASSERT_EQ(got.shape(), shape);
  const Tensor dense = contiguous(got);
  const int64_t* p = dense.values<int64_t>();
  EXPECT_EQ(std::vector<int64_t>(p, p + dense.numel()), values);
}

TEST(Slicing, PositionsAndSlices) {
  const Tensor x = places(2, 3, 4);
  expect_values(x.index({1, 2, 3}), {}, {123});
  expect_values(x.index({1, -1, -4}), {}, {120});
  expect_values(x.index({0, Slice(), 1}), {3}, {1, 11, 21});
  expect_values(x.index({1, Slice(1, 3), Slice(None, 2)}), {2, 2}, {110, 111, 120, 121});
  expect_values(x.index({0, 0, Slice(None, None, 2)}), {2}, {0, 2});
  expect_values(x.index({0, 0, Slice(1, None)}), {3}, {1, 2, 3});
  expect_values(x.index({0, 0, Slice(-2)}), {2}, {2, 3});
  expect_values(x.index({0, 0, Slice(1, -1)}), {2}, {1, 2});
  expect_values(x.index({0, 0, Slice(3, 100)}), {1}, {3});
  expect_values(x.index({0, 0, Slice(3, 1)}), {0}, {});
  EXPECT_TRUE(equal(x.index({1}), x[1]));
  EXPECT_TRUE(equal(x.index({}), x));
}

TEST(Slicing, NewDimsAndTheRest) {
  const Tensor x = places(2, 3, 4);
  EXPECT_EQ(x.index({None}).shape(), (Shape{1, 2, 3, 4}));
  EXPECT_EQ(x.index({Slice(), None, 0}).shape(), (Shape{2, 1, 4}));
  EXPECT_EQ(x.index({Ellipsis, None}).shape(), (Shape{2, 3, 4, 1}));
  expect_values(x.index({Ellipsis, 1}), {2, 3}, {1, 11, 21, 101, 111, 121});
  expect_values(x.index({1, Ellipsis, Slice(0, 1)}), {3, 1}, {100, 110, 120});
  expect_values(x.index({1, 1, Ellipsis, 1}), {}, {111});
}

TEST(Slicing, TensorsOfPositionsAndOfBools) {
  const Tensor x = places(2, 3, 4), rows = from_values<int64_t>({2, 0, -1}, {3}),
               columns = from_values<int64_t>({3, 1, 0}, {3});
  expect_values(x.index({0, rows, columns}), {3}, {23, 1, 20});
  expect_values(x.index({0, rows, 1}), {3}, {21, 1, 21});
  expect_values(x.index({Ellipsis, columns}).index({1, 2}), {3}, {123, 121, 120});
  expect_values(x.index({Slice(), rows, Slice(0, 2)}).index({1}), {3, 2},
                {120, 121, 100, 101, 120, 121});
  expect_values(x.index({None, 1, rows, 0}), {1, 3}, {120, 100, 120});
  expect_values(x.index({x > 121}), {2}, {122, 123});
  expect_values(x.index({1, x[1].index({Ellipsis, 0}) > 100, 0}), {2}, {110, 120});
  expect_values(x.index({Ellipsis, from_values<int64_t>({2}, {})}).index({1}), {3},
                {102, 112, 122});
}

TEST(Slicing, IsAViewWithoutTensors) {
  const Tensor x = zeros({3, 4});
  x.index({Slice(1, 3), Slice(None, None, 2)}).fill_(1);
  EXPECT_EQ(sum(x).item<float>(), 4);
  EXPECT_EQ(x.index({2, 2}).item<float>(), 1);
}

TEST(Slicing, Differentiates) {
  Tensor x = ones({3, 4}).requires_grad_();
  x.index({Slice(0, 2), from_values<int64_t>({1, 1}, {2})}).sum().backward();
  EXPECT_TRUE(equal(x.grad()[0], tensor({0., 2., 0., 0.})));
  EXPECT_TRUE(equal(x.grad()[2], zeros(4)));
}

TEST(Slicing, Refuses) {
  const Tensor x = places(2, 3, 4);
  expect_contains(error_of([&] { x.index({0, 0, 0, 0}); }), "4 entries for dims");
  expect_contains(error_of([&] { x.index({Ellipsis, 0, Ellipsis}); }), "2 ellipses");
  expect_contains(error_of([&] { x.index({2}); }), "index 2 of a dim of extent 2");
  expect_contains(error_of([&] { x.index({Slice(None, None, -1)}); }), "steps are at least 1");
}

}  // namespace
}  // namespace tessera
