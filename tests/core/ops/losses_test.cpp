// Losses of pairs, margins and likelihoods: each element against its formula in doubles, their
// reductions, and what they refuse.
#include "core/ops/losses.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/autograd/autograd.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

constexpr int64_t kN = 6;
Tensor draw(const Shape& shape = {kN}) { return randn(shape, {.dtype = kF64}); }
Tensor signs() { return tensor({1., -1., -1., 1., 1., -1.}, {.dtype = kF64}); }
double at(const Tensor& t, int64_t i) { return t[i].item<double>(); }
double over(double x) { return std::max(x, 0.0); }

// Every element is what `formula` says of its place; mean and sum are those of the elements.
void check(const std::function<Tensor(Reduction)>& loss,
           const std::function<double(int64_t)>& formula, int64_t n = kN) {
  const Tensor each = loss(Reduction::kNone);
  ASSERT_EQ(each.numel(), n);
  double total = 0;
  for (int64_t i = 0; i < n; ++i) {
    EXPECT_NEAR(at(each.flatten(), i), formula(i), 1e-10) << i;
    total += formula(i);
  }
  EXPECT_NEAR(loss(Reduction::kSum).item<double>(), total, 1e-9);
  EXPECT_NEAR(loss(Reduction::kMean).item<double>(), total / double(n), 1e-9);
}

TEST(Losses, OfPairs) {
  const Tensor a = draw(), b = draw(), y = signs();
  check([&](Reduction r) { return margin_ranking_loss(a, b, y, 0.3, r); },
        [&](int64_t i) { return over(0.3 - at(y, i) * (at(a, i) - at(b, i))); });
  check([&](Reduction r) { return hinge_embedding_loss(a, y, 0.7, r); },
        [&](int64_t i) { return at(y, i) == 1 ? at(a, i) : over(0.7 - at(a, i)); });
  check([&](Reduction r) { return soft_margin_loss(a, y, r); },
        [&](int64_t i) { return std::log1p(std::exp(-at(y, i) * at(a, i))); });
  expect_contains(error_of([&] { margin_ranking_loss(a, draw({2}), y); }), "x is");
  expect_contains(error_of([&] { soft_margin_loss(a, draw({kN, 1})); }), "reshape one of them");
}

TEST(Losses, OfPairsOfVectors) {
  const Tensor a = draw({kN, 4}), b = draw({kN, 4}), c = draw({kN, 4}), y = signs();
  auto dot = [](const Tensor& p, const Tensor& q) { return sum(p * q).item<double>(); };
  auto far = [&](const Tensor& p, const Tensor& q, double power) {
    return std::pow(sum(pow(abs(p - q + 1e-6), power)).item<double>(), 1 / power);
  };
  check([&](Reduction r) { return cosine_embedding_loss(a, b, y, 0.1, r); },
        [&](int64_t i) {
          const double cosine = dot(a[i], b[i]) / std::sqrt(dot(a[i], a[i]) * dot(b[i], b[i]));
          return at(y, i) == 1 ? 1 - cosine : over(cosine - 0.1);
        });
  EXPECT_NEAR(cosine_embedding_loss(a[0], a[0], tensor(1.)).item<double>(), 0, 1e-9);
  check([&](Reduction r) { return triplet_margin_loss(a, b, c, {.margin = 0.5, .reduction = r}); },
        [&](int64_t i) { return over(far(a[i], b[i], 2) - far(a[i], c[i], 2) + 0.5); });
  check(
      [&](Reduction r) {
        return triplet_margin_loss(a, b, c, {.p = 3, .swap = true, .reduction = r});
      },
      [&](int64_t i) {
        return over(far(a[i], b[i], 3) - std::min(far(a[i], c[i], 3), far(b[i], c[i], 3)) + 1);
      });
  expect_contains(error_of([&] { cosine_embedding_loss(a, b, draw({2})); }),
                  "takes [N, D] and [N]");
}

TEST(Losses, OfClasses) {
  const Tensor x = draw({kN, 3}), y = (draw({kN, 3}) > 0).to(kF64),
               classes = tensor({0, 2, 1, 1, 0, 2});
  auto value = [&](int64_t i, int64_t j) { return x[i][j].item<double>(); };
  auto bce = [&](int64_t i, int64_t j) {
    return std::log1p(std::exp(value(i, j))) - y[i][j].item<double>() * value(i, j);
  };
  check([&](Reduction r) { return multilabel_soft_margin_loss(x, y, {}, r); },
        [&](int64_t i) { return (bce(i, 0) + bce(i, 1) + bce(i, 2)) / 3; });
  for (int64_t p : {1, 2})
    check([&](Reduction r) { return multi_margin_loss(x, classes, p, 0.8, r); },
          [&](int64_t i) {
            double total = 0;
            const int64_t own = classes[i].item<int64_t>();
            for (int64_t j = 0; j < 3; ++j)
              if (j != own) total += std::pow(over(0.8 - value(i, own) + value(i, j)), double(p));
            return total / 3;
          });
  for (double alpha : {0.25, -1.0})
    check([&](Reduction r) { return sigmoid_focal_loss(x, y, alpha, 1.5, r); },
          [&](int64_t k) {
            const int64_t i = k / 3, j = k % 3;
            const double q = 1 / (1 + std::exp(-value(i, j))), t = y[i][j].item<double>();
            const double weight = alpha < 0 ? 1 : t == 1 ? alpha : 1 - alpha;
            return weight * bce(i, j) * std::pow(t == 1 ? 1 - q : q, 1.5);
          },
          3 * kN);
  EXPECT_EQ(sigmoid_focal_loss(x, y).shape(), x.shape());
  expect_contains(error_of([&] { multi_margin_loss(x, classes, 3); }), "power 3");
  expect_contains(error_of([&] { multi_margin_loss(x, classes[0]); }), "[N, V] and [N]");
}

TEST(Losses, Likelihoods) {
  const Tensor x = draw(), rate = exp(draw()),
               counts = tensor({0., 1., 2., 5., 9., 3.}, {.dtype = kF64}), y = draw(),
               var = exp(draw());
  auto stirling = [](double n) {
    return n > 1 ? n * std::log(n) - n + 0.5 * std::log(2 * M_PI * n) : 0;
  };
  check([&](Reduction r) { return poisson_nll_loss(x, counts, {.reduction = r}); },
        [&](int64_t i) { return std::exp(at(x, i)) - at(counts, i) * at(x, i); });
  check(
      [&](Reduction r) {
        return poisson_nll_loss(rate, counts, {.log_input = false, .full = true, .reduction = r});
      },
      [&](int64_t i) {
        return at(rate, i) - at(counts, i) * std::log(at(rate, i) + 1e-8) + stirling(at(counts, i));
      });
  for (bool full : {false, true})
    check([&](Reduction r) { return gaussian_nll_loss(x, y, var, {.full = full, .reduction = r}); },
          [&](int64_t i) {
            const double d = at(x, i) - at(y, i);
            return 0.5 * (std::log(at(var, i)) + d * d / at(var, i)) +
                   (full ? 0.5 * std::log(2 * M_PI) : 0);
          });
  // The least variance bounds the value; its gradient is that of a variance as large as it.
  Tensor none = zeros({1}, {.dtype = kF64}).requires_grad_();
  const Tensor one = ones({1}, {.dtype = kF64});
  Tensor loss = gaussian_nll_loss(one * 2.0, one, none, {.eps = 0.25});
  EXPECT_NEAR(loss.item<double>(), 0.5 * (std::log(0.25) + 4), 1e-12);
  loss.backward();
  EXPECT_NEAR(none.grad().item<double>(), 0.5 * (4 - 16), 1e-12);
  expect_contains(error_of([&] { gaussian_nll_loss(x, y, draw({7})); }), "gaussian_nll_loss");
}

// Where nothing is over the margin or a class is not there, gradients are 0 and finite.
TEST(Losses, GradientsAreThoseOfDifferences) {
  const Tensor a = draw({kN, 4}), b = draw({kN, 4}), c = draw({kN, 4}), y = signs();
  const std::function<Tensor(const Tensor&)> losses[] = {
      [&](const Tensor& x) { return triplet_margin_loss(x, b, c); },
      [&](const Tensor& x) { return cosine_embedding_loss(x, b, y); },
      [&](const Tensor& x) {
        return multi_margin_loss(x, tensor({0, 3, 1, 2, 0, 1}));
      },
      [&](const Tensor& x) { return mean(sigmoid_focal_loss(x, (b > 0).to(kF64))); },
      [&](const Tensor& x) { return poisson_nll_loss(x, abs(c), {.full = true}); }};
  for (auto& loss : losses) {
    Tensor x = a.clone().requires_grad_();
    loss(x).backward();
    NoGrad off;
    for (int64_t i : {0, 5, 23}) {
      const double h = 1e-6;
      const Tensor step = reshape(one_hot(tensor({i}), 24).to(kF64) * h, {kN, 4});
      const double slope = (loss(a + step) - loss(a - step)).item<double>() / (2 * h);
      EXPECT_NEAR(at(x.grad().flatten(), i), slope, 1e-6);
    }
  }
}

}  // namespace
}  // namespace tessera
