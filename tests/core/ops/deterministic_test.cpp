// In deterministic mode results depend on operands alone: they have the same bits in every run and
// on any number of threads, for products and convolutions of libraries, sums into one place, and
// gradients.
#include "core/base/deterministic.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <thread>

#include "core/autograd/autograd.h"
#include "core/base/parallel.h"
#include "core/nn/nn.h"
#include "core/ops/batch_norm.h"
#include "core/ops/contract.h"
#include "core/ops/conv.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/pool.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/scan.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

using F = std::function<Tensor(const std::vector<Tensor>&)>;
struct Case {
  const char* name;
  std::vector<Shape> shapes;
  F f;
};

Tensor values(const Shape& s, int64_t key) {
  return randn(s, {kF32}, from_values<int64_t>({key, 7}, {2}));
}
Tensor indices(int64_t n, int64_t below) {
  return randint(0, below, {n}, {}, from_values<int64_t>({n, below}, {2}));
}

// Sums long enough to be worth splitting, results too few to share otherwise; and larger ones.
std::vector<Case> cases() {
  auto product = [](const std::vector<Tensor>& t) { return matmul(t[0], t[1]); };
  auto convolution = [](ConvGeometry o) {
    return [o](const std::vector<Tensor>& t) { return conv2d(t[0], t[1], {}, o); };
  };
  return {
      {"few results", {{4, 20000}, {20000, 3}}, product},
      {"one column", {{300, 3000}, {3000, 1}}, product},
      {"large product", {{256, 700}, {700, 300}}, product},
      {"batched product", {{5, 30, 400}, {5, 400, 20}}, product},
      {"convolution", {{4, 32, 14, 14}, {32, 32, 3, 3}}, convolution({.padding = 1})},
      {"3 x 3", {{4, 32, 24, 24}, {64, 32, 3, 3}}, convolution({.padding = 1})},
      {"3 x 3 of many", {{6, 96, 14, 14}, {64, 96, 3, 3}}, convolution({.padding = 1})},
      {"one image", {{1, 16, 60, 60}, {32, 16, 3, 3}}, convolution({.stride = 2})},
      {"wide channels", {{2, 128, 7, 7}, {128, 128, 3, 3}}, convolution({.padding = 1})},
      {"1 x 1", {{2, 64, 20, 20}, {96, 64, 1, 1}}, convolution({})},
      {"groups", {{3, 32, 16, 16}, {32, 8, 3, 3}}, convolution({.groups = 4})},
      {"attention",
       {{2, 4, 70, 16}, {2, 4, 70, 16}, {2, 4, 70, 16}},
       [](const std::vector<Tensor>& t) { return scaled_dot_product_attention(t[0], t[1], t[2]); }},
      {"batch_norm",
       {{6, 9, 40, 40}},
       [](const std::vector<Tensor>& t) { return batch_norm(t[0], {}, {}, {.training = true}); }},
      {"layer_norm",
       {{300, 200}, {200}, {200}},
       [](const std::vector<Tensor>& t) { return layer_norm(t[0], t[1], t[2]); }},
      {"sums",
       {{700, 301}},
       [](const std::vector<Tensor>& t) {
         return sum(t[0]) + sum(t[0], {0}) + sum(cumsum(t[0], 1), {1}, true);
       }},
      {"into the same place",
       {{50, 8}, {40000, 8}},
       [](const std::vector<Tensor>& t) { return index_add(t[0], 0, indices(40000, 50), t[1]); }},
      {"looked up many times",
       {{30, 8}},
       [](const std::vector<Tensor>& t) { return embedding(indices(40000, 30), t[0]); }},
      {"pools",
       {{3, 8, 33, 33}},
       [](const std::vector<Tensor>& t) {
         return max_pool2d(t[0], 3, {.stride = 2}) + avg_pool2d(t[0], 3, {.stride = 2});
       }},
  };
}

// The result and the gradients of a sum of its squares.
std::vector<Tensor> run(const Case& c, DType t) {
  std::vector<Tensor> in, out;
  for (size_t i = 0; i < c.shapes.size(); ++i)
    in.push_back(values(c.shapes[i], int64_t(i)).to(t).detach().requires_grad_());
  const Tensor y = c.f(in), loss = sum(square(y.to(kF32)));
  out.push_back(y.detach());
  for (const Tensor& g : grad({&loss, 1}, in)) out.push_back(g);
  return out;
}

class Threads {
 public:
  explicit Threads(int n) : before_(num_threads()) { set_num_threads(n); }
  ~Threads() { set_num_threads(before_); }

 private:
  int before_;
};

// Elements whose bits differ.
int64_t differing(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const Tensor x = contiguous(a[i]), y = contiguous(b[i]);
    const size_t size = size_of(x.dtype());
    for (int64_t e = 0; e < x.numel(); ++e)
      count += std::memcmp(static_cast<const char*>(x.raw_values()) + size_t(e) * size,
                           static_cast<const char*>(y.raw_values()) + size_t(e) * size, size) != 0;
  }
  return count;
}

TEST(Deterministic, EqualBitsOnAnyNumberOfThreads) {
  DeterministicScope on;
  for (const Case& c : cases())
    for (DType t : {kF32, kBF16, kF64}) {
      std::vector<Tensor> want;
      for (int threads : {1, 2, 3, 4, 1}) {
        Threads scope(threads);
        const std::vector<Tensor> got = run(c, t);
        if (want.empty()) want = got;
        EXPECT_EQ(differing(got, want), 0) << c.name << " " << name_of(t) << " on " << threads;
      }
    }
}

// What libraries prepared for a shape, for all threads, is not used in deterministic mode.
TEST(Deterministic, EqualBitsAfterTheSameCallsInTheOtherMode) {
  Threads two(2);
  for (const Case& c : cases())
    for (DType t : {kF32, kBF16}) {
      (void)run(c, t);
      DeterministicScope on;
      const std::vector<Tensor> got = run(c, t);
      std::vector<Tensor> want;
      std::thread([&] {  // has prepared nothing yet
        DeterministicScope too;
        want = run(c, t);
      })
          .join();
      EXPECT_EQ(differing(got, want), 0) << c.name << " " << name_of(t);
    }
}

// The largest difference, of the largest magnitude.
double apart(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const Tensor x = a[i].to(kF64), y = b[i].to(kF64);
    worst = std::max(worst, amax(abs(x - y)).item<double>() / amax(abs(y)).item<double>());
  }
  return worst;
}

// Which products the library splits is its choice; what it may not do is compute others. Sums of
// up to 200,000 terms and the gradient of a sum of squares behind them, in another order: u
// sqrt(200,000) with u = 2^-24, and 4 of that. In bf16 a sum that is another in f32 may round to
// the neighbour, and so may the gradient of it: two units in the last place of 8 digits.
TEST(Deterministic, WithoutItSumsComeInAnotherOrderOnly) {
  int64_t differ = 0;
  for (const Case& c : cases())
    for (DType t : {kF32, kBF16}) {
      std::vector<Tensor> one;
      for (int threads : {1, 2, 4}) {
        Threads scope(threads);
        const std::vector<Tensor> got = run(c, t);
        if (one.empty()) one = got;
        differ += differing(got, one);
        EXPECT_LE(apart(got, one), t == kF32 ? 4 * 0x1p-24 * std::sqrt(2e5) : 2 * 0x1p-7)
            << c.name << " " << name_of(t) << " on " << threads;
      }
    }
  RecordProperty("differing", std::to_string(differ));
}

TEST(Deterministic, TheModeIsOfItsScopeAndThread) {
  EXPECT_FALSE(deterministic_algorithms());
  {
    DeterministicScope on;
    EXPECT_TRUE(deterministic_algorithms());
    {
      DeterministicScope off(false);
      EXPECT_FALSE(deterministic_algorithms());
    }
    EXPECT_TRUE(deterministic_algorithms());
    Threads scope(2);
    run(cases()[0], kF32);
    EXPECT_EQ(num_threads(), 2);  // ours stay
  }
  EXPECT_FALSE(deterministic_algorithms());
}

}  // namespace
}  // namespace tessera
