// Edges of single ops, where the golden cases do not reach: numbers that no double holds, draws
// next to 1, operands without dims, long lists of pieces, zeros in products, and the results that
// in-place updates refuse.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "core/autograd/autograd.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/einsum.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/layout.h"
#include "core/ops/losses.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/samples.h"
#include "core/ops/sort.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}
std::vector<double> values(const Tensor& t) {
  Tensor d = contiguous(t.detach().to(kF64));
  return {d.data<double>(), d.data<double>() + d.numel()};
}

TEST(Edges, UniformDrawsStayBelowOneInSixteenBits) {
  for (DType t : {kBF16, kF16}) {
    manual_seed(1);
    Tensor x = rand({200'000}, {.dtype = t});
    EXPECT_LT(amax(x).item<double>(), 1) << name_of(t);
    EXPECT_GE(amin(x).item<double>(), 0) << name_of(t);
    EXPECT_NEAR(mean(x.to(kF64)).item<double>(), 0.5, 0.005) << name_of(t);
    manual_seed(1);
    Tensor wide = rand({200'000}, {.dtype = kF32}) - x.to(kF32);
    EXPECT_GE(amin(wide).item<double>(), 0) << "the same draws, cut off";
    EXPECT_LT(amax(wide).item<double>(), t == kBF16 ? 0x1p-8 : 0x1p-11);
  }
}

TEST(Edges, RealDrawsOfIntegersAreRefused) {
  for (DType t : {kBool, kU8, kI32, kI64}) {
    EXPECT_TRUE(contains(error_of([&] { rand({2}, {.dtype = t}); }), "use randint"));
    EXPECT_TRUE(contains(error_of([&] { randn({2}, {.dtype = t}); }), "use randint"));
  }
}

TEST(Edges, IntegersBeyondDoublesAreExact) {
  constexpr int64_t big = (int64_t(1) << 53) + 1, huge = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(full({3}, big).data<int64_t>()[2], big);
  EXPECT_EQ(full({1}, huge).item<int64_t>(), huge);
  EXPECT_EQ(full({1}, -huge - 1).item<int64_t>(), -huge - 1);
  EXPECT_EQ(full_like(empty({2}, kI64), big).data<int64_t>()[1], big);
  Tensor x = arange(big, big + 7, 3);
  ASSERT_EQ(x.numel(), 3);
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(x.data<int64_t>()[i], big + 3 * i);
  Tensor ends = arange(huge - 1, -huge - 1, -huge);
  ASSERT_EQ(ends.numel(), 2);
  EXPECT_EQ(ends.data<int64_t>()[1], -1);
  EXPECT_EQ(arange(5, 5).numel(), 0);
  EXPECT_EQ(arange(0, 5, 2, {.dtype = kF32}).data<float>()[2], 4);
}

TEST(Edges, SearchsortedNeedsARowOfEdges) {
  EXPECT_TRUE(contains(
      error_of([] { searchsorted(scalar_tensor(1.0, kF64), scalar_tensor(1.0, kF64)); }), "[N]"));
  Tensor edges = from_values<double>({1, 3, 5}, {3});
  EXPECT_EQ(searchsorted(edges, scalar_tensor(4.0, kF64)).item<int64_t>(), 2);
}

TEST(Edges, UpdatesRefuseResultsTheirDestinationCannotHold) {
  Tensor i = arange(0, 4), flags = zeros({4}, {.dtype = kBool});
  EXPECT_TRUE(contains(error_of([&] { mul_(i, 2.5); }), "mul_: the result is f32"));
  EXPECT_TRUE(contains(error_of([&] { add_(i, ones({4})); }), "add_: the result is f32"));
  EXPECT_TRUE(contains(error_of([&] { add_(flags, i); }), "add_: the result is i64"));
  EXPECT_EQ(values(i), (std::vector<double>{0, 1, 2, 3}));
  mul_(i, 3);
  add_(i, flags);
  EXPECT_EQ(values(i), (std::vector<double>{0, 3, 6, 9}));
  Tensor half = ones({2}, {.dtype = kBF16});
  add_(half, ones({2}, {.dtype = kF64}));  // a float holds any float
  EXPECT_EQ(values(half), (std::vector<double>{2, 2}));
}

TEST(Edges, DestinationsMustFitAndHaveMemoryOfTheirOwn) {
  Tensor x = zeros({3}), twice = expand(x, {2, 3});
  EXPECT_TRUE(contains(error_of([&] { fill_(twice, 1); }), "dim 0"));
  EXPECT_TRUE(contains(error_of([&] { add_(twice, ones({2, 3})); }), "clone it first"));
  EXPECT_EQ(values(x), (std::vector<double>{0, 0, 0}));
  fill_(expand(x, {1, 3}), 2);  // nothing is repeated
  EXPECT_EQ(values(x), (std::vector<double>{2, 2, 2}));
}

TEST(Edges, MetaDestinationsTakeNothing) {
  Tensor x = empty({3}, kF32, kMeta);
  uint32_t before = x.storage()->version();
  add_(x, empty({3}, kF32, kMeta));
  EXPECT_EQ(x.storage()->version(), before + 1);
  EXPECT_TRUE(contains(error_of([&] { add_(x, empty({2, 3}, kF32, kMeta)); }), "destination is"));
  EXPECT_TRUE(contains(error_of([&] { assign_(x, ones({3})); }), "destination is"));
  Tensor y = ones({3});
  EXPECT_TRUE(contains(error_of([&] { assign_(y, x); }), "destination is"));
}

TEST(Edges, SplitsIntoAnyNumberOfPieces) {
  Tensor x = sample_values({20, 3}, -1, 1, 1).requires_grad_();
  std::vector<int64_t> sizes(40, 0);
  for (size_t i = 0; i < 20; ++i) sizes[2 * i] = 1;
  Tensors parts = split(x, sizes, 0);
  ASSERT_EQ(parts.size(), 40u);
  EXPECT_EQ(values(cat(parts, 0)), values(x));
  backward(sum(parts[4] * 3.0) + sum(parts[38]));
  for (int64_t i = 0; i < 20; ++i)
    EXPECT_EQ(x.grad().data<double>()[3 * i], i == 2 ? 3 : i == 19 ? 1 : 0) << i;
  EXPECT_TRUE(contains(error_of([&] { split(x, {21, -1}, 0); }), "not negative"));
  EXPECT_TRUE(contains(error_of([&] { split(x, {3, 3}, 0); }), "do not add up"));
  EXPECT_TRUE(contains(error_of([&] { split(scalar_tensor(1.0, kF64), {1}); }), "0-d"));
}

TEST(Edges, JoinsOfOnePartAreNewTensors) {
  Tensor x = ones({3});
  Tensor joined = cat({&x, 1}, 0), stacked = stack({&x, 1}, 0), once = repeat(x, {1}),
         tiled = tile(x, {1}), lead = repeat(x, {1, 1});
  fill_(x, 5);
  for (const Tensor& t : {joined, stacked, once, tiled, lead})
    EXPECT_EQ(values(t), (std::vector<double>{1, 1, 1}));
}

TEST(Edges, EinsumWalksDiagonals) {
  Tensor m = sample_values({4, 4}, -1, 1, 1), v = sample_values({4}, -1, 1, 2),
         t = sample_values({3, 4, 3}, -1, 1, 3);
  auto one = [](std::string_view spec, const Tensor& x) { return einsum(spec, {&x, 1}); };
  Tensor trace = one("ii->", m), d = one("ii->i", m), off = one("iji->ij", t);
  double want = 0;
  for (int64_t i = 0; i < 4; ++i) {
    want += m.data<double>()[5 * i];
    EXPECT_EQ(values(d)[size_t(i)], m.data<double>()[5 * i]);
    for (int64_t r = 0; r < 3; ++r)
      EXPECT_EQ(values(off)[size_t(4 * r + i)], t.data<double>()[13 * r + 3 * i]) << r << " " << i;
  }
  EXPECT_NEAR(trace.item<double>(), want, 1e-15);
  Tensor both[] = {m, v};
  double dot = 0;
  for (int64_t i = 0; i < 4; ++i) dot += m.data<double>()[5 * i] * v.data<double>()[i];
  EXPECT_NEAR(einsum("ii,i->", both).item<double>(), dot, 1e-15);
  m.requires_grad_();
  backward(one("ii->", m));
  for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(m.grad().data<double>()[i], i % 5 == 0);
  EXPECT_TRUE(contains(error_of([&] {
                         one("iij->ij", sample_values({2, 3, 2}, 0, 1, 1));
                       }),
                       "whose extents"));
}

TEST(Edges, ContractionsHaveMoreLettersThanATensorHasDims) {
  Tensor a = sample_values({2, 2, 2, 2, 2, 2}, -1, 1, 1),
         b = sample_values({2, 2, 2, 2, 2, 2}, -1, 1, 2);
  Tensor c = contract("abcxyz,defxyz->abcdef", a, b);
  Tensor want = matmul(reshape(a, {8, 8}), transpose(reshape(b, {8, 8}), 0, 1));
  for (int64_t i = 0; i < 64; ++i)
    EXPECT_NEAR(c.data<double>()[i], want.data<double>()[i], 1e-14) << i;
  EXPECT_TRUE(
      contains(error_of([&] { contract("abcdxy,efghxz->abcdefghz", a, b); }), "more than 8 dims"));
}

TEST(Edges, GradientOfProdIsLinearAndHandlesZerosAndNothing) {
  for (std::vector<double> v : {std::vector<double>{2, 3, 4, 5}, {2, 0, 4, 5}, {0, 3, 0, 5}}) {
    Tensor x = from_values<double>(v, {4}).requires_grad_();
    Tensor root = prod(x);
    Tensor g = grad({&root, 1}, {&x, 1}, {}, {.create_graph = true})[0];
    Tensor weight = from_values<double>({1, 10, 100, 1000}, {4}), second = sum(g * weight);
    Tensor h = grad({&second, 1}, {&x, 1})[0];
    for (size_t i = 0; i < 4; ++i) {
      double others = 1, row = 0;
      for (size_t k = 0; k < 4; ++k) {
        others *= k == i ? 1 : v[k];
        if (k == i) continue;
        double rest = weight.data<double>()[k];
        for (size_t l = 0; l < 4; ++l) rest *= l == i || l == k ? 1 : v[l];
        row += rest;
      }
      EXPECT_EQ(g.data<double>()[i], others) << i;
      EXPECT_NEAR(h.data<double>()[i], row, 1e-12) << i;
    }
  }
  Tensor none = zeros({0, 3}, {.dtype = kF64}).requires_grad_();
  backward(sum(prod(none, {0})));
  EXPECT_EQ(none.grad().shape(), (Shape{0, 3}));
  Tensor many = full({100'000}, 1.0, {.dtype = kF64}).requires_grad_();
  backward(prod(many));
  EXPECT_EQ(amin(many.grad()).item<double>(), 1);
}

TEST(Edges, CrossEntropyOfProbabilities) {
  Tensor logits = sample_values({2, 3, 4}, -2, 2, 1),
         target = softmax(sample_values({2, 3, 4}, -1, 1, 2)),
         weight = from_values<double>({0.5, 1, 2, 3}, {4});
  for (double smoothing : {0.0, 0.2})
    for (const Tensor& w : {Tensor(), weight}) {
      double total = 0;
      std::vector<double> rows;
      for (int64_t r = 0; r < 6; ++r) {
        const double *x = logits.data<double>() + 4 * r, *p = target.data<double>() + 4 * r;
        double sum = 0, loss = 0;
        for (int c = 0; c < 4; ++c) sum += std::exp(x[c]);
        for (int c = 0; c < 4; ++c)
          loss -= (w.defined() ? w.data<double>()[c] : 1) *
                  (p[c] * (1 - smoothing) + smoothing / 4) * (x[c] - std::log(sum));
        rows.push_back(loss), total += loss;
      }
      CrossEntropyOptions o{.label_smoothing = smoothing, .weight = w, .dim = -1};
      EXPECT_NEAR(cross_entropy(logits, target, o).item<double>(), total / 6, 1e-14);
      o.reduction = Reduction::kSum;
      EXPECT_NEAR(cross_entropy(logits, target, o).item<double>(), total, 1e-13);
      o.reduction = Reduction::kNone;
      Tensor each = cross_entropy(logits, target, o);
      EXPECT_EQ(each.shape(), (Shape{2, 3}));
      for (size_t r = 0; r < 6; ++r) EXPECT_NEAR(values(each)[r], rows[r], 1e-14);
    }
  // Certain targets are classes, and both operands have gradients.
  Tensor classes = sample_integers({2, 3}, 0, 4, 3), certain = one_hot(classes, 4).to(kF64);
  Tensor x = clone(logits).requires_grad_(), y = clone(logits).requires_grad_();
  certain.requires_grad_();
  Tensor a = cross_entropy(x, certain, {.dim = -1}), b = cross_entropy(y, classes, {.dim = -1});
  EXPECT_NEAR(a.item<double>(), b.item<double>(), 1e-14);
  backward(a), backward(b);
  for (size_t i = 0; i < 24; ++i) EXPECT_NEAR(values(x.grad())[i], values(y.grad())[i], 1e-15);
  EXPECT_NEAR(values(certain.grad())[0], -values(log_softmax(logits))[0] / 6, 1e-15);
  EXPECT_EQ(cross_entropy(logits.to(kBF16), target.to(kBF16)).dtype(), kBF16);
  EXPECT_TRUE(contains(error_of([&] { cross_entropy(logits, sum(target, {-1})); }), "same shape"));
  EXPECT_TRUE(contains(error_of([&] { cross_entropy(logits, target, {.ignore_index = 1}); }),
                       "ignore_index"));
}

TEST(Edges, DerivativesOfLgammaEndAtTrigamma) {
  Tensor x = from_values<double>({0.7, 3.2}, {2}).requires_grad_();
  Tensor y = sum(lgamma(x)), g = grad({&y, 1}, {&x, 1}, {}, {.create_graph = true})[0];
  EXPECT_NEAR(values(g)[1], 0.998838891287, 1e-10);  // psi(3.2)
  Tensor total = sum(g), h = grad({&total, 1}, {&x, 1}, {}, {.create_graph = true})[0];
  EXPECT_NEAR(values(h)[0], 2.83404915669, 1e-10);
  Tensor last = sum(h);
  EXPECT_THROW(grad({&last, 1}, {&x, 1}), NotDifferentiable);
  EXPECT_EQ(values(polygamma(1, x)), values(trigamma(x)));
  EXPECT_TRUE(contains(error_of([&] { polygamma(2, x); }), "orders 0 and 1"));
}

// Rows of 16-bit floats are joined column by column, and have the bits of the same rows in f32.
TEST(Reduce, SixteenBitRowsHaveTheBitsOfWideOnes) {
  for (DType t : {kBF16, kF16})
    for (const Shape& shape : {Shape{1000, 300}, {2, 700, 33}, {3, 40, 1025}, {9000, 40}}) {
      Tensor x = cast(sample_values(shape, -1, 1, 1), t);
      const int dim = shape.size() - 2;
      Tensor low = sum(x, {dim}), wide = cast(sum(cast(x, kF32), {dim}), t);
      EXPECT_EQ(std::memcmp(low.raw(), wide.raw(), wide.nbytes()), 0) << to_string(shape);
    }
}

// What a sigmoid that is saturated gives.
TEST(Losses, CertainProbabilitiesHaveFiniteGradients) {
  for (DType t : {kF32, kF64}) {
    Tensor x = from_values<float>({0, 0, 1, 1, 0.25}, {5}).to(t).requires_grad_(),
           y = from_values<float>({0, 1, 1, 0, 1}, {5}).to(t);
    Tensor loss = binary_cross_entropy(x, y, {}, Reduction::kSum);
    loss.backward();
    EXPECT_NEAR(loss.to(kF64).item<double>(), 200 - std::log(0.25), 1e-4) << name_of(t);
    EXPECT_EQ(values(x.grad()), (std::vector<double>{1, 0, -1, 0, -4})) << name_of(t);
  }
}

TEST(Losses, DoNotBroadcast) {
  Tensor x = ones({4, 1}), y = zeros({4});
  const std::pair<const char*, std::function<void()>> losses[] = {
      {"mse_loss", [&] { mse_loss(x, y); }},
      {"l1_loss", [&] { l1_loss(x, y); }},
      {"smooth_l1_loss", [&] { smooth_l1_loss(x, y); }},
      {"huber_loss", [&] { huber_loss(x, y); }},
      {"binary_cross_entropy", [&] { binary_cross_entropy(x, y); }},
      {"binary_cross_entropy_with_logits", [&] { binary_cross_entropy_with_logits(x, y); }},
      {"kl_div", [&] { kl_div(x, y); }},
  };
  for (const auto& [name, loss] : losses)
    EXPECT_TRUE(contains(error_of(loss), name + std::string(": x is f32[4, 1]"))) << name;
}

// The slope of |x|^p, p < 1, is infinite at 0.
TEST(Norms, GradientsAtZeroAreZero) {
  for (double p : {0.5, 1.0, 1.5, 2.0, 3.0}) {
    Tensor x = from_values<float>({0, 4, 0, 0}, {2, 2}).requires_grad_();
    backward(sum(norm(x, p, {1})));
    const float expected[] = {0, 1, 0, 0};
    for (int i = 0; i < 4; ++i) EXPECT_NEAR(x.grad().data<float>()[i], expected[i], 1e-6) << p;
  }
}

TEST(Losses, WeightsBroadcastToTheLossAndDoNotEnlargeIt) {
  Tensor x = full({4}, 0.5), y = zeros({4}), one = ones({1}), column = ones({4, 1});
  constexpr Reduction kNone = Reduction::kNone;
  EXPECT_EQ(binary_cross_entropy(x, y, one, kNone).shape(), Shape{4});
  EXPECT_EQ(binary_cross_entropy_with_logits(x, y, one, one, kNone).shape(), Shape{4});
  EXPECT_THROW(binary_cross_entropy(x, y, column), ShapeError);
  EXPECT_THROW(binary_cross_entropy_with_logits(x, y, column), ShapeError);
  EXPECT_THROW(binary_cross_entropy_with_logits(x, y, {}, column), ShapeError);
}

// Targets of fewer rows, or weights of more classes, would be taken for a part.
TEST(Losses, NllChecksEveryExtent) {
  auto classes = [](const Shape& s) { return zeros(s, {.dtype = kI64}); };
  EXPECT_THROW(nll_loss(zeros({4, 3}), classes({2})), ShapeError);
  EXPECT_THROW(nll_loss(zeros({2, 5, 3}), classes({2, 4}), {.dim = -1}), ShapeError);
  EXPECT_THROW(nll_loss(zeros({2, 3, 5}), classes({2, 5}), {.dim = -1}), ShapeError);
  EXPECT_THROW(nll_loss(zeros({2, 3, 5}), classes({2, 3})), ShapeError);
  EXPECT_THROW(nll_loss(zeros({4, 3}), classes({4}), {.weight = ones({5})}), ShapeError);
  EXPECT_EQ(nll_loss(zeros({2, 5, 3}), classes({2, 5}),
                     {.weight = ones({3}), .reduction = Reduction::kNone, .dim = -1})
                .shape(),
            (Shape{2, 5}));
  EXPECT_EQ(nll_loss(zeros({2, 3, 5}), classes({2, 5}),
                     {.weight = ones({3}), .reduction = Reduction::kNone})
                .shape(),
            (Shape{2, 5}));
}

// A shape of other elements would be a view of memory that is not there.
TEST(Views, ReshapeChecksTheNumberOfElements) {
  const Tensor x = arange(0, 16, 1), transposed = transpose(reshape(x, {4, 4}), 0, 1);
  EXPECT_EQ(reshape(x, {2, 8}).shape(), (Shape{2, 8}));
  EXPECT_EQ(reshape(x, {2, -1}).shape(), (Shape{2, 8}));
  constexpr int64_t kHuge = int64_t(1) << 32;  // its square is 0 in 64 bits
  for (const Tensor& t : {x, transposed, ones({1}), zeros({0, 3})})
    for (const Shape& to : {Shape{5, 5}, Shape{32}, Shape{4}, Shape{3, -1, -1}, Shape{-2, -8}})
      EXPECT_THROW(reshape(t, to), ShapeError) << to_string(t.shape()) << ' ' << to_string(to);
  EXPECT_THROW(reshape(zeros({0}), {kHuge, kHuge}), Error);
  EXPECT_THROW(reshape(ones({1}), {-1, -1}), ShapeError);
}

}  // namespace
}  // namespace tessera
