// Compiled functions on a card, real or virtual: the graph, its executor and its generated kernels
// compute what the function computes there.
#include <gtest/gtest.h>

#include <cmath>

#include "compile/compile.h"
#include "core/core.h"
#include "core/tensor/device_runtime.h"
#include "tests/compile/training.h"
#include "tests/support/on_card.h"

namespace tessera::test {
namespace {

class CompiledOnCard : public OnCard {
 protected:
  void SetUp() override {
    OnCard::SetUp();
    if (!IsSkipped()) scope_.emplace(card_);
  }
  Tensor drawn(const Shape& shape, int64_t key) {
    return randn(shape, {.device = kCPU}, from_values<int64_t>({key, 1}, {2})).to(card_);
  }
  std::optional<DeviceScope> scope_;
};

void expect_close(const Tensor& a, const Tensor& b, double tolerance) {
  EXPECT_TRUE(allclose(a.cpu().to(kF64), b.cpu().to(kF64), tolerance, tolerance))
      << to_string(a) << "\n"
      << to_string(b);
}

TEST_F(CompiledOnCard, AStepOfTraining) {
  Training eager(0.1), compiled(0.1);
  auto step = compile(
      [&](const Tensor& ids, const Tensor& targets) { return compiled.step(ids, targets); });
  int64_t memory = 0;
  for (int k = 0; k < 6; ++k) {
    if (k == 4) memory = memory_stats(card_).system_calls;
    const auto [ids, targets] = batch(k);
    const Tensors want = eager.step(ids.to(card_), targets.to(card_)),
                  got = step(ids.to(card_), targets.to(card_));
    for (size_t i = 0; i < want.size(); ++i) expect_close(got[i], want[i], 2e-5);
  }
  EXPECT_GE(step.report().replays, 3) << step.report().why_not;
  EXPECT_EQ(step.report().unoptimised, "");
  EXPECT_EQ(memory_stats(card_).system_calls, memory) << "memory of the driver in a steady step";
  const auto want = eager.state(), got = compiled.state();
  for (size_t i = 0; i < want.size(); ++i) {
    SCOPED_TRACE(want[i].name);
    expect_close(got[i].tensor, want[i].tensor, 2e-3);
  }
}

TEST_F(CompiledOnCard, NumbersOfTheHostAreReadAtEachCall) {
  Tensor rate = scalar_tensor(0.5, kF32, kCPU);
  auto f = compile([&](const Tensor& x) { return exp(x * rate) + rate; });
  for (int k = 0; k < 5; ++k) {
    assign_(rate, scalar_tensor(0.5 + k, kF32, kCPU));
    const Tensor x = drawn({3, 40}, k);
    expect_close(f(x), exp(x * (0.5 + k)) + (0.5 + k), 1e-6);
  }
  EXPECT_GE(f.report().replays, 2) << f.report().why_not;
}

TEST_F(CompiledOnCard, TablesMadeOfNumbersAlone) {
  Tensor rate = scalar_tensor(0.5, kF32, kCPU), one = from_values<float>({2}, {1});
  auto f = compile([&](const Tensor& x) {
    const Tensor ramp = (arange(0, 40, 1, {kF32, card_}) * 2.0) * rate;
    return x * exp(ramp * 0.01) + exp(full({3, 40}, 0.25, {kF32, card_}) * rate) +
           x * one.reshape({});
  });
  for (int k = 0; k < 5; ++k) {
    assign_(rate, scalar_tensor(0.5 + k, kF32, kCPU));
    const Tensor x = drawn({3, 40}, k), ramp = arange(0, 40, 1, {kF32, card_}) * 2.0 * (0.5 + k);
    expect_close(f(x), x * exp(ramp * 0.01) + std::exp(0.25 * (0.5 + k)) + x * 2.0, 1e-5);
  }
  EXPECT_GE(f.report().replays, 2) << f.report().why_not;
}

TEST_F(CompiledOnCard, StreamsByTurns) {
  auto f = compile([&](const Tensor& x) {
    const Tensor a = exp(x), b = softmax(a.sum(1) - x.mean(1), 0);
    return (a * b.unsqueeze(1)).sum(0) + x.sum(0);
  });
  DeviceRuntime& runtime = runtime_of(card_);
  for (int k = 0; k < 8; ++k) {
    const Tensor x = drawn({64, 500}, k);
    std::optional<StreamScope> beside;
    if (k % 2) beside.emplace(runtime.copy_stream(card_.index, 0));
    const Tensor got = f(x);
    beside.reset();
    const Tensor a = exp(x), b = softmax(a.sum(1) - x.mean(1), 0);
    expect_close(got, (a * b.unsqueeze(1)).sum(0) + x.sum(0), 1e-4);
  }
}

TEST_F(CompiledOnCard, ValuesGoToTheHostAndComeBack) {
  auto f = compile([&](const Tensor& x) {
    const Tensor there = (x * x + 1.0).sum(1).to(kCPU);
    return std::pair(there, softmax(there.to(card_) - x.sum(1), 0));
  });
  for (int k = 0; k < 5; ++k) {
    const Tensor x = drawn({4, 30}, k);
    const auto [sums, shares] = f(x);
    EXPECT_TRUE(sums.device().is_cpu());
    expect_close(sums, (x * x + 1.0).sum(1), 1e-5);
    expect_close(shares, softmax((x * x + 1.0).sum(1) - x.sum(1), 0), 1e-5);
  }
  EXPECT_GE(f.report().replays, 2) << f.report().why_not;
}

TEST_F(CompiledOnCard, FactorisationsByTheHost) {
  const auto factor = [&](const Tensor& x) {
    return linalg::cholesky(matmul(x, transpose(x, 0, 1)) + eye(6, {kF32, card_})) * 2.0;
  };
  auto f = compile(factor);
  for (int k = 0; k < 5; ++k) {
    const Tensor x = drawn({6, 6}, k);
    expect_close(f(x), factor(x), 1e-5);
  }
  EXPECT_GE(f.report().replays, 2) << f.report().why_not;
}

TEST_F(CompiledOnCard, SizesThatVary) {
  auto f = compile([&](const Tensor& x) { return softmax(gelu(x) * 2.0, 1).sum(0); });
  for (int64_t n : {5, 5, 7, 9, 12, 30, 31, 64, 5}) {
    const Tensor x = drawn({3, n}, n);
    expect_close(f(x), softmax(gelu(x) * 2.0, 1).sum(0), 1e-5);
  }
}

TEST_F(CompiledOnCard, AFunctionThatReadsAValue) {
  auto f = compile([&](const Tensor& x) {
    const Tensor y = x * 3.0 + 1.0;
    return y.sum().item<float>() > 0 ? exp(y) : -y;
  });
  for (int k = 0; k < 5; ++k) {
    const Tensor x = drawn({50}, k), y = x * 3.0 + 1.0;
    expect_close(f(x), y.sum().item<float>() > 0 ? exp(y) : -y, 1e-6);
  }
}

}  // namespace
}  // namespace tessera::test
