// Indexing, order and layout where the golden cases do not reach: errors, empty operands, ties,
// other dtypes, larger sizes that take the parallel paths.
#include "core/ops/indexing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/autograd/autograd.h"
#include "core/base/parallel.h"
#include "core/ops/compose.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/samples.h"
#include "core/ops/scan.h"
#include "core/ops/sort.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using List = std::vector<Tensor>;

Tensor ints(std::initializer_list<int64_t> v) {
  return from_values<int64_t>(v, {int64_t(v.size())});
}

TEST(Indexing, OutOfRangeNamesIndexPositionAndExtent) {
  Tensor x = zeros({3, 5});
  EXPECT_EQ(error_of([&] {
              gather(x, 1, reshape(ints({0, 1, 5, 0, 0, 0}), {3, 2}));
            }),
            "gather: index 5 at position [1, 0] is outside dim 1 of extent 5");
  EXPECT_EQ(error_of([&] {
              index_select(x, 0, ints({0, 3}));
            }),
            "gather: index 3 at position [1, 0] is outside dim 0 of extent 3");
  EXPECT_EQ(error_of([&] {
              index(x, List{ints({0, -4})});
            }),
            "index: -4 at position [1] is outside a dim of extent 3");
  EXPECT_EQ(error_of([&] {
              index(x, List{ints({0}), ints({7})});
            }),
            "index: 7 at position [0] is outside a dim of extent 5");
  EXPECT_THROW(scatter_add(x, 0, reshape(ints({3}), {1, 1}), ones({1, 1})), UserError);
  EXPECT_THROW(scatter(x, 0, reshape(ints({0}), {1, 1}), ones({1, 1}, {.dtype = kF64})), UserError);
  EXPECT_THROW(gather(x, 0, zeros({1, 5})), UserError) << "a float index";
  EXPECT_THROW(gather(x, 0, ints({0})), ShapeError);
  EXPECT_THROW(one_hot(ints({0, 4}), 4), UserError);
  EXPECT_THROW(one_hot(ints({0, -1}), 4), UserError);
  EXPECT_THROW(masked_fill(x, zeros({3, 5}), 1), UserError) << "a mask that is not bool";
}

TEST(Indexing, EmptyIndicesGiveEmptyResults) {
  Tensor x = ones({3, 5}), none = empty({0}, kI64);
  EXPECT_EQ(index_select(x, 1, none).shape(), (Shape{3, 0}));
  EXPECT_EQ(index(x, List{none, none}).shape(), (Shape{0}));
  EXPECT_TRUE(equal(index_add(x, 0, none, empty({0, 5})), x));
  EXPECT_EQ(nonzero(zeros({2, 2})).shape(), (Shape{0, 2}));
  EXPECT_EQ(masked_select(x, lt(x, 0)).shape(), (Shape{0}));
  EXPECT_EQ(sort(empty({0})).values.shape(), (Shape{0}));
  EXPECT_EQ(unique(empty({0})).counts.shape(), (Shape{0}));
  EXPECT_EQ(cumsum(empty({2, 0}), 1).shape(), (Shape{2, 0}));
  EXPECT_EQ(nonzero(ones({})).shape(), (Shape{1, 0}));
}

TEST(Indexing, RunningExtremesAreAtTheLastOfEqualOnes) {
  const Tensor x = ints({2, 2, 1, 1, 2, 1});
  EXPECT_TRUE(equal(cummax(x, 0).indices, ints({0, 1, 1, 1, 4, 4})));
  EXPECT_TRUE(equal(cummin(x, 0).indices, ints({0, 1, 2, 3, 3, 5})));
}

TEST(Indexing, EveryDtype) {
  for (DType t : kComputedDTypes) {
    Tensor x = cast(ints({0, 1, 1, 0}), t);
    EXPECT_TRUE(equal(index_select(x, 0, ints({1, 0})), cast(ints({1, 0}), t))) << name_of(t);
    EXPECT_TRUE(equal(scatter(x, 0, ints({0}), cast(ints({1}), t)), cast(ints({1, 1, 1, 0}), t)))
        << name_of(t);
    EXPECT_TRUE(equal(sort(x, 0).values, cast(ints({0, 0, 1, 1}), t))) << name_of(t);
    EXPECT_TRUE(equal(sort(x, 0, true).indices, ints({1, 2, 0, 3}))) << name_of(t);
    EXPECT_TRUE(equal(cumsum(x, 0), cast(ints({0, 1, 2, 2}), is_integral(t) ? kI64 : t)))
        << name_of(t);
    if (t != kBool) {
      EXPECT_TRUE(equal(scatter_add(x, 0, ints({2, 2}), cast(ints({1, 1}), t)),
                        cast(ints({0, 1, 3, 0}), t)))
          << name_of(t);
      EXPECT_EQ(argmax(x).item<int64_t>(), 1) << name_of(t);
      EXPECT_EQ(argmin(x).item<int64_t>(), 0) << name_of(t);
    }
  }
}

TEST(Indexing, SumsMeetInOneOrderWhateverTheThreads) {
  Tensor at = sample_integers({20'000}, 0, 50, 1),
         src = cast(sample_values({20'000, 40}, -1, 1, 2), kF32), like = empty({50, 40});
  Tensor index = expand(unsqueeze(at, 1), {20'000, 40});
  int threads = num_threads();
  set_num_threads(1);
  Tensor one = scatter_sum(like, 0, index, src),
         dense = scatter_sum(like, 0, contiguous(index), src);
  set_num_threads(4);
  Tensor four = scatter_sum(like, 0, index, src);
  set_num_threads(threads);
  EXPECT_TRUE(equal(one, four));
  EXPECT_TRUE(equal(one, dense)) << "an index spread out in memory adds up the same";
}

TEST(Sort, LargeRowsAreStableAndMatchTheLibrary) {
  Tensor x = sample_integers({3, 10'000}, 0, 100, 1);
  auto [values, indices] = sort(x, 1);
  for (int64_t r = 0; r < 3; ++r) {
    std::vector<int64_t> row(x.data<int64_t>() + r * 10'000, x.data<int64_t>() + (r + 1) * 10'000),
        order(10'000);
    for (int64_t i = 0; i < 10'000; ++i) order[size_t(i)] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return row[size_t(a)] < row[size_t(b)]; });
    EXPECT_TRUE(std::equal(order.begin(), order.end(), indices.data<int64_t>() + r * 10'000));
  }
  EXPECT_TRUE(equal(gather(x, 1, indices), values));
  EXPECT_TRUE(equal(topk(x, 17, 1).indices, narrow(sort(x, 1, true).indices, 1, 0, 17)));
  EXPECT_TRUE(equal(kthvalue(x, 1234, 1).values, select(values, 1, 1233)));
  EXPECT_THROW(kthvalue(x, 0, 1), UserError);
  EXPECT_THROW(topk(x, 10'001, 1), UserError);
  EXPECT_THROW(argmax(empty({0})), UserError);
}

TEST(Sort, CountsAndBins) {
  EXPECT_TRUE(equal(bincount(ints({1, 3, 1})), ints({0, 2, 0, 1})));
  EXPECT_TRUE(equal(bincount(ints({1}), {}, 3), ints({0, 1, 0})));
  EXPECT_TRUE(equal(bincount(ints({0, 1, 0}), from_values<float>({1, 2, 3}, {3})),
                    from_values<float>({4, 2}, {2})));
  EXPECT_THROW(bincount(ints({-1})), UserError);
  Tensor edges = from_values<float>({1, 2, 3}, {3}),
         x = reshape(from_values<float>({0, 1, 2.5, 4}, {4}), {2, 2});
  EXPECT_TRUE(equal(searchsorted(edges, x), reshape(ints({0, 0, 2, 3}), {2, 2})));
}

TEST(Layout, RearrangingKeepsEveryElement) {
  Tensor x = reshape(arange(0, 24), {2, 3, 4});
  EXPECT_TRUE(equal(flip(flip(x, {0, -1}), {0, -1}), x));
  EXPECT_TRUE(equal(roll(roll(x, {5, -2}, {2, 0}), {-5, 2}, {2, 0}), x));
  EXPECT_TRUE(equal(movedim(movedim(x, {0}, {2}), {2}, {0}), x));
  EXPECT_TRUE(equal(swapaxes(x, 0, -1), transpose(x, 0, 2)));
  EXPECT_TRUE(equal(tile(ints({1, 2}), {2, 2}), reshape(ints({1, 2, 1, 2, 1, 2, 1, 2}), {2, 4})));
  EXPECT_TRUE(equal(repeat_interleave(ints({1, 2}), 2, 0), ints({1, 1, 2, 2})));
  EXPECT_EQ(repeat(x, {0, 1, 1}).shape(), (Shape{0, 3, 4}));
  EXPECT_TRUE(equal(diagonal(reshape(arange(0, 6), {2, 3}), -1), ints({3})));
  EXPECT_EQ(diagonal(reshape(arange(0, 6), {2, 3}), 5).shape(), (Shape{0}));
  EXPECT_TRUE(equal(diag(ints({1, 2}), 1), reshape(ints({0, 1, 0, 0, 0, 2, 0, 0, 0}), {3, 3})));
  EXPECT_TRUE(equal(pad(ints({1, 2, 3}), {1, 0}, PadMode::kReflect), ints({2, 1, 2, 3})));
  EXPECT_THROW(pad(ints({1, 2, 3}), {3, 0}, PadMode::kReflect), UserError);
  for (PadMode mode : {PadMode::kReflect, PadMode::kReplicate, PadMode::kCircular})
    expect_contains(error_of([&] {
                      pad(zeros({2, 0}), {0, 1}, mode);
                    }),
                    "pad: 0 before and 1 after");
  EXPECT_THROW(pad(ints({1}), {1}), UserError);
  EXPECT_TRUE(equal(diff(ints({1, 4, 9, 16}), 2), ints({2, 2})));
  EXPECT_TRUE(equal(outer(ints({1, 2}), ints({3, 4})), reshape(ints({3, 4, 6, 8}), {2, 2})));
  EXPECT_TRUE(equal(cross(ints({1, 0, 0}), ints({0, 1, 0})), ints({0, 0, 1})));
}

TEST(Compose, ComparisonOfTensors) {
  Tensor a = from_values<double>({1, 2}, {2});
  EXPECT_TRUE(allclose(a, a + 1e-9));
  EXPECT_FALSE(allclose(a, a + 1e-3));
  EXPECT_FALSE(equal(a, a + 1e-9));
  EXPECT_FALSE(equal(a, unsqueeze(a, 0)));
  EXPECT_THROW(isclose(a, cast(a, kF32)), UserError);
}

// What scatter_reduce says of itself, one element after the other.
std::vector<double> reduced_by_hand(const Tensor& x, const Tensor& index, const Tensor& src,
                                    ScatterReduce how, bool include_self) {
  std::vector<double> out(x.data<double>(), x.data<double>() + x.numel());
  int64_t columns = x.size(1), width = index.size(1);
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < x.size(0); ++r) {
      std::vector<double> met;
      for (int64_t k = 0; c < width && k < index.size(0); ++k)
        if (index.data<int64_t>()[k * width + c] == r)
          met.push_back(src.data<double>()[k * src.size(1) + c]);
      double& y = out[size_t(r * columns + c)];
      if (met.empty()) continue;
      if (include_self) met.push_back(y);
      y = met[0];
      for (size_t k = 1; k < met.size(); ++k)
        y = how == ScatterReduce::kProd   ? y * met[k]
            : how == ScatterReduce::kAmax ? std::max(y, met[k])
            : how == ScatterReduce::kAmin ? std::min(y, met[k])
                                          : y + met[k];
      if (how == ScatterReduce::kMean) y /= double(met.size());
    }
  return out;
}

constexpr ScatterReduce kAllReductions[] = {ScatterReduce::kSum, ScatterReduce::kProd,
                                            ScatterReduce::kMean, ScatterReduce::kAmax,
                                            ScatterReduce::kAmin};

TEST(ScatterReduce, EqualsTheLoop) {
  // The index reaches neither the last column of x nor all of src.
  Tensor x = sample_values({4, 3}, -1, 1, 1), index = sample_integers({6, 2}, 0, 4, 2),
         src = sample_values({7, 3}, -1, 1, 3);
  for (ScatterReduce how : kAllReductions)
    for (bool self : {true, false}) {
      std::vector<double> want = reduced_by_hand(x, index, src, how, self);
      Tensor got = contiguous(scatter_reduce(x, 0, index, src, how, self));
      for (int64_t i = 0; i < 12; ++i)
        EXPECT_NEAR(got.data<double>()[i], want[size_t(i)], 1e-14)
            << int(how) << " " << self << " element " << i;
    }
}

TEST(ScatterReduce, GradientsEqualFiniteDifferences) {
  Tensor x = sample_values({4, 3}, -1, 1, 1), index = sample_integers({6, 2}, 0, 4, 2),
         src = sample_values({6, 2}, -1, 1, 3), weight = sample_values({4, 3}, -1, 1, 4);
  x.data<double>()[4] = 0;  // alone among its factors, or beside the zeros of src
  src.data<double>()[0] = src.data<double>()[5] = 0;
  for (ScatterReduce how : kAllReductions)
    for (bool self : {true, false}) {
      auto loss = [&](const Tensor& a, const Tensor& b) {
        return sum(scatter_reduce(a, 0, index, b, how, self) * weight);
      };
      Tensor a = clone(x).requires_grad_(), b = clone(src).requires_grad_();
      backward(loss(a, b));
      for (bool of_src : {false, true}) {
        const Tensor& t = of_src ? src : x;
        for (int64_t i = 0; i < t.numel(); ++i) {
          auto at = [&](double step) {
            Tensor u = clone(t);
            u.data<double>()[i] += step;
            return (of_src ? loss(x, u) : loss(u, src)).item<double>();
          };
          EXPECT_NEAR((of_src ? b : a).grad().data<double>()[i], (at(1e-6) - at(-1e-6)) / 2e-6,
                      1e-7)
              << int(how) << " " << self << (of_src ? " src " : " x ") << i;
        }
      }
    }
}

TEST(ScatterReduce, EqualExtremesShareTheGradient) {
  Tensor x = from_values<double>({2, 5}, {2}).requires_grad_(),
         src = from_values<double>({2, 1, 2}, {3}).requires_grad_();
  backward(sum(scatter_reduce(x, 0, ints({0, 0, 0}), src, ScatterReduce::kAmax)));
  EXPECT_DOUBLE_EQ(x.grad().data<double>()[0], 1.0 / 3);
  EXPECT_DOUBLE_EQ(x.grad().data<double>()[1], 1);
  EXPECT_DOUBLE_EQ(src.grad().data<double>()[0], 1.0 / 3);
  EXPECT_DOUBLE_EQ(src.grad().data<double>()[1], 0);
}

TEST(ScatterReduce, IntegersAndNarrowFloats) {
  Tensor x = ints({10, 20, 30}), at = ints({0, 0, 2, 0}), src = ints({-4, 9, 7, -3});
  auto run = [&](ScatterReduce how, bool self) {
    Tensor y = scatter_reduce(x, 0, at, src, how, self);
    return std::vector<int64_t>(y.data<int64_t>(), y.data<int64_t>() + 3);
  };
  using Row = std::vector<int64_t>;
  EXPECT_EQ(run(ScatterReduce::kAmax, false), (Row{9, 20, 7}));
  EXPECT_EQ(run(ScatterReduce::kAmin, false), (Row{-4, 20, 7}));
  EXPECT_EQ(run(ScatterReduce::kProd, true), (Row{1080, 20, 210}));
  EXPECT_EQ(run(ScatterReduce::kMean, true), (Row{3, 20, 18}));
  EXPECT_EQ(run(ScatterReduce::kMean, false), (Row{0, 20, 7}));
  // 1000 ones and a sum that bf16 could not count to.
  Tensor narrow = scatter_reduce(zeros({1}, {.dtype = kBF16}), 0, zeros({1000}, {.dtype = kI64}),
                                 ones({1000}, {.dtype = kBF16}), ScatterReduce::kMean, false);
  EXPECT_EQ(narrow.item<double>(), 1);
  Tensor nan = scatter_reduce(from_values<double>({1}, {1}), 0, ints({0, 0}),
                              from_values<double>({NAN, 3}, {2}), ScatterReduce::kAmax);
  EXPECT_TRUE(std::isnan(nan.item<double>()));
}

}  // namespace
}  // namespace tessera
