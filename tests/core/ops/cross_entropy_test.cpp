// Cross-entropy's kernel for floats works in one sweep with a reference that may lie below a row's
// maximum: against the same in double, over lengths around its groups and blocks, rows whose
// maximum comes late, and masked or missing values. A row's bits depend on nothing but its values.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "core/autograd/autograd.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/losses.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct LossAndGradient {
  Tensor loss, grad;
};

LossAndGradient run(const Tensor& x, const Tensor& targets, Reduction reduction) {
  Tensor leaf = x.detach();
  leaf.requires_grad_();
  Tensor loss = cross_entropy(leaf, targets, {.reduction = reduction});
  loss.backward();
  return {loss.detach(), leaf.grad()};
}

// Values in [-4, 4) from a fixed sequence.
Tensor logits(int64_t rows, int64_t n) {
  Tensor x = empty({rows, n});
  uint32_t state = 12345;
  for (int64_t i = 0; i < x.numel(); ++i) {
    state = state * 1664525u + 1013904223u;
    x.data<float>()[i] = float(state >> 8) * 0x1p-21f - 4.0f;
  }
  return x;
}
Tensor classes(int64_t rows, int64_t n) {
  Tensor t = empty({rows}, kI64);
  for (int64_t r = 0; r < rows; ++r) t.data<int64_t>()[r] = (r * 7919 + n - 1) % n;
  return t;
}

void expect_as_double(const Tensor& x, const Tensor& targets) {
  LossAndGradient got = run(x, targets, Reduction::kSum),
                  want = run(cast(x, kF64), targets, Reduction::kSum);
  const double loss = want.loss.item<double>();
  EXPECT_NEAR(double(got.loss.item<float>()), loss, 1e-6 * (1 + std::abs(loss)));
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double g = want.grad.data<double>()[i];
    ASSERT_NEAR(double(got.grad.data<float>()[i]), g, 2e-6 * std::abs(g) + 2e-7) << "element " << i;
  }
}

TEST(CrossEntropy, AgreesWithDoubleAtEveryLength) {
  for (int64_t n : {1, 2, 31, 32, 46, 47, 48, 65, 79, 96, 1000, 1038, 1039, 1040, 2100, 5003}) {
    SCOPED_TRACE(n);
    expect_as_double(logits(3, n), classes(3, n));
  }
}

TEST(CrossEntropy, MaximumMayComeLate) {
  for (int64_t n : {100, 3000, 3040}) {
    for (float step : {30.0f, 60.0f, 500.0f}) {
      SCOPED_TRACE(testing::Message() << n << " values, steps of " << step);
      Tensor x = logits(2, n);
      for (int64_t i = 0; i < n; ++i) x.data<float>()[i] += step * float(i * 5 / n);  // row 0 rises
      x.data<float>()[2 * n - 1] = 2 * step;  // row 1's last
      expect_as_double(x, classes(2, n));
    }
  }
}

TEST(CrossEntropy, MaskedAndMissingValues) {
  const int64_t n = 2500;
  Tensor x = logits(4, n), targets = classes(4, n);
  float* v = x.data<float>();
  for (int64_t i = 0; i < 1200; ++i) v[i] = -kInf;   // a masked first block
  for (int64_t i = 0; i < n; ++i) v[n + i] = -kInf;  // nothing left
  v[2 * n + 1700] = std::numeric_limits<float>::quiet_NaN();
  v[3 * n + 2499] = kInf;
  targets.data<int64_t>()[0] = 2000;
  expect_as_double(narrow(x, 0, 0, 1), narrow(targets, 0, 0, 1));
  EXPECT_EQ(
      run(narrow(x, 0, 0, 1), narrow(targets, 0, 0, 1), Reduction::kSum).grad.data<float>()[0],
      0.0f);
  for (int64_t r = 1; r < 4; ++r) {
    SCOPED_TRACE(r);
    LossAndGradient got = run(narrow(x, 0, r, 1), narrow(targets, 0, r, 1), Reduction::kSum);
    EXPECT_TRUE(std::isnan(got.loss.item<float>()));
    for (int64_t i : {0, 1000, 2000, 2499})
      EXPECT_TRUE(std::isnan(got.grad.data<float>()[i])) << "element " << i;
  }
}

TEST(CrossEntropy, IgnoredRowsMayHoldAnything) {
  const int64_t n = 1500;
  Tensor x = logits(4, n), targets = classes(4, n);
  for (int64_t r : {1, 3}) targets.data<int64_t>()[r] = -100, x.data<float>()[r * n + 5] = NAN;
  LossAndGradient got = run(x, targets, Reduction::kMean);
  for (int64_t r = 0; r < 4; r += 2) {
    LossAndGradient alone = run(narrow(x, 0, r, 1), narrow(targets, 0, r, 1), Reduction::kMean);
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(got.grad.data<float>()[r * n + i], 0.5f * alone.grad.data<float>()[i]);
      ASSERT_EQ(got.grad.data<float>()[(r + 1) * n + i], 0.0f);
    }
  }
}

// Above 64 MiB results bypass the caches: the bits of a row are those it has alone, whatever its
// place in memory, and without a gradient the loss is the same.
TEST(CrossEntropy, BitsOfARowAreItsOwn) {
  const int64_t rows = 340, n = 50257;
  Tensor x = logits(rows, n), targets = classes(rows, n);
  LossAndGradient all = run(x, targets, Reduction::kSum);
  for (int64_t r : {0, 1, 2, 3, 171, 339}) {
    SCOPED_TRACE(r);
    Tensor row = narrow(x, 0, r, 1), target = narrow(targets, 0, r, 1);
    LossAndGradient alone = run(row, target, Reduction::kSum);
    EXPECT_EQ(std::memcmp(alone.grad.data<float>(), all.grad.data<float>() + r * n, size_t(n) * 4),
              0);
    EXPECT_EQ(alone.loss.item<float>(),
              cross_entropy(row, target, {.reduction = Reduction::kSum}).item<float>());
  }
  EXPECT_EQ(all.loss.item<float>(),
            cross_entropy(x, targets, {.reduction = Reduction::kSum}).item<float>());
}

// [N, V, L] with targets [N, V] has as many elements as it should where V and L are equal.
TEST(CrossEntropy, ClassesAreInDimOneUnlessDimSaysElse) {
  auto refused = [](const Shape& of_logits, const Shape& of_targets,
                    std::optional<int64_t> dim = {}) {
    for (Reduction reduction : {Reduction::kMean, Reduction::kSum, Reduction::kNone})
      for (double smoothing : {0.0, 0.1}) try {
          cross_entropy(zeros(of_logits), zeros(of_targets, {.dtype = kI64}),
                        {.label_smoothing = smoothing, .reduction = reduction, .dim = dim});
          ADD_FAILURE() << "accepted";
        } catch (const ShapeError& e) {
          EXPECT_NE(std::string(e.what()).find("-1 for [B, T, V]"), std::string::npos) << e.what();
        }
  };
  refused({2, 3, 5}, {3, 2}, -1);
  refused({2, 3, 4, 4}, {2, 4, 4}, -1);
  refused({2, 4, 3}, {2, 3}, -1);
  refused({2, 5, 3}, {2, 5});
  refused({2, 3, 4, 5}, {2, 3, 4});
  refused({4, 5}, {5});
  refused({2, 3, 5}, {2, 5}, 2);
  auto shape_of = [](const Shape& of_logits, const Shape& of_targets,
                     std::optional<int64_t> dim = {}) {
    return cross_entropy(zeros(of_logits), zeros(of_targets, {.dtype = kI64}),
                         {.reduction = Reduction::kNone, .dim = dim})
        .shape();
  };
  EXPECT_EQ(shape_of({2, 3, 5}, {2, 3}, -1), (Shape{2, 3}));
  EXPECT_EQ(shape_of({2, 3, 5}, {2, 5}), (Shape{2, 5}));
  EXPECT_EQ(shape_of({2, 3, 4, 5}, {2, 4, 5}), (Shape{2, 4, 5}));
  EXPECT_EQ(shape_of({2, 3, 5}, {3, 5}, 0), (Shape{3, 5}));
  EXPECT_EQ(shape_of({2, 3}, {2}), (Shape{2}));
  EXPECT_EQ(shape_of({3}, {}), Shape());
  EXPECT_THROW(shape_of({2, 3}, {2}, 2), ShapeError);
}

// An image [N, V, H, W] has the loss and gradient of its pixels as rows, for classes and for
// distributions over them; where all extents agree no check could notice the wrong dim.
TEST(CrossEntropy, OfPixelsIsThatOfRows) {
  const Tensor x = sample_values({3, 3, 3, 3}, -2, 2, 1), t = sample_integers({3, 3, 3}, 0, 3, 2);
  const Tensor p = softmax(sample_values({3, 3, 3, 3}, -1, 1, 3), 1),
               weight = from_values<double>({0.5, 1, 2}, {3});
  auto rows = [](const Tensor& image) { return reshape(permute(image, {0, 2, 3, 1}), {27, 3}); };
  for (double smoothing : {0.0, 0.2})
    for (const Tensor& w : {Tensor(), weight})
      for (const Tensor& targets : {t, p}) {
        Tensor image = clone(x).requires_grad_(), flat = rows(x).detach().requires_grad_();
        CrossEntropyOptions o{.label_smoothing = smoothing, .weight = w};
        Tensor a = cross_entropy(image, targets, o);
        Tensor b =
            cross_entropy(flat, targets.ndim() == 3 ? reshape(targets, {27}) : rows(targets), o);
        EXPECT_NEAR(a.item<double>(), b.item<double>(), 1e-14);
        a.backward(), b.backward();
        EXPECT_LE(amax(abs(rows(image.grad()) - flat.grad())).item<double>(), 1e-15);
      }
  Tensor logp = log_softmax(x, 1);
  EXPECT_NEAR(nll_loss(logp, t).item<double>(), cross_entropy(x, t).item<double>(), 1e-14);
  EXPECT_EQ(nll_loss(permute(logp, {0, 2, 3, 1}), t, {.dim = -1}).item<double>(),
            nll_loss(rows(logp), reshape(t, {27})).item<double>());
}

// One of each row would multiply rows, one of each logit all of them.
TEST(CrossEntropy, WeightsAreOfClasses) {
  const Tensor logits = zeros({4, 3}), classes = zeros({4}, {.dtype = kI64});
  for (const Shape& shape : {Shape{1}, Shape{4, 1}, Shape{4, 3}, Shape{2, 1, 3}})
    for (const Tensor& targets : {classes, zeros({4, 3})})
      EXPECT_THROW(cross_entropy(logits, targets, {.weight = ones(shape)}), ShapeError)
          << to_string(shape);
  EXPECT_EQ(cross_entropy(logits, classes, {.weight = ones({3})}).shape(), Shape());
}

TEST(CrossEntropy, ErrorsBeginWithTheFunctionThatWasCalled) {
  const Tensor logits = zeros({4, 3}), classes = zeros({4}, {.dtype = kI64});
  expect_contains(error_of([&] { cross_entropy(logits, classes, {.dim = 2}); }),
                  "cross_entropy: dim 2 of a tensor with 2 dims");
  expect_contains(error_of([&] { nll_loss(logits, classes, {.dim = -3}); }), "nll_loss: dim -3");
  expect_contains(error_of([&] { log_softmax(logits, 2); }), "log_softmax: dim 2");
  expect_contains(error_of([&] { softmax(logits, 2); }), "softmax: dim 2");
  expect_contains(error_of([&] { cross_entropy(classes.unsqueeze(0), classes[0].unsqueeze(0)); }),
                  "float logits and integer targets, got i64[1, 4] cpu and i64[1] cpu; cast");
}

}  // namespace
}  // namespace tessera
