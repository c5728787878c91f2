#include <gtest/gtest.h>

#include <limits>
#include <mutex>

#include "collectives/loopback/run_ranks.h"
#include "compile/compile.h"
#include "core/core.h"
#include "dtensor/dtensor.h"
#include "parallel/fsdp.h"

using namespace tessera;

std::unique_ptr<optim::Optimizer> signum(optim::Params params, double lr, double beta);

namespace {

auto small_net() {
  auto model = nn::sequential(nn::linear(6, 8), nn::tanh(), nn::linear(8, 2));
  model->init(3);
  return model;
}

// The parameters, whole, after some steps; `wrap`: what runs a step.
template <class Wrap>
Tensors train(nn::Module& model, int steps, Wrap wrap) {
  auto opt = signum(model.named_parameters(), 0.01, 0.9);
  auto step = wrap([&](const Tensor& x, const Tensor& y) {
    opt->zero_grad();
    const Tensor loss = nn::mse_loss(model(x), y);
    loss.backward();
    opt->step(optim::clip_grad_norm(model.parameters(), 1.0).scale);
    return loss.detach();
  });
  manual_seed(7);
  const Tensor w = randn({6, 2});
  for (int i = 0; i < steps; ++i) {
    const Tensor x = randn({16, 6});
    step(x, matmul(x, w));
  }
  Tensors whole;
  for (const Tensor& p : model.parameters()) whole.push_back(full_tensor(p.detach()));
  return whole;
}
constexpr auto kEager = [](auto step) { return step; };

void expect_close(const Tensors& got, const Tensors& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(allclose(got[i], want[i], 1e-4, 1e-6)) << i;
}

TEST(Optimizer, FollowsItsFormula) {
  Tensor p = from_values<double>({1, -2, 3}, {3}).requires_grad_();
  auto opt = signum(std::vector<Tensor>{p}, 0.5, 0.5);
  sum(p * from_values<double>({4, -4, 0}, {3})).backward();
  opt->step();
  EXPECT_TRUE(equal(p.detach(), from_values<double>({0.5, -1.5, 3}, {3})));
  opt->zero_grad();
  sum(p * from_values<double>({-1, -1, 1}, {3})).backward();
  opt->step(scalar_tensor(3.0, kF64));  // m: 2 * 0.5 - 1.5, -2 * 0.5 - 1.5, 1.5
  EXPECT_TRUE(equal(p.detach(), from_values<double>({1, -1, 2.5}, {3})));
  opt->step_if_finite(scalar_tensor(std::numeric_limits<double>::infinity(), kF64));
  EXPECT_TRUE(equal(p.detach(), from_values<double>({1, -1, 2.5}, {3})));
}

TEST(Optimizer, GoesOnFromItsState) {
  Tensor p = ones({3}).requires_grad_(), q = ones({3}).requires_grad_();
  auto first = signum(std::vector<Tensor>{p}, 0.5, 0.9);
  sum(p * 2.0).backward();
  first->step();
  {
    NoGrad off;
    assign_(q, p.detach());
  }
  auto second = signum(std::vector<Tensor>{q}, 0.1, 0.9);
  second->load_state(first->named_state());
  first->zero_grad();
  for (Tensor* t : {&p, &q}) sum(*t * -1.0).backward();  // the momentum keeps the sign of 2
  first->step(), second->step();
  EXPECT_TRUE(equal(p.detach(), zeros({3})));
  EXPECT_TRUE(equal(q.detach(), p.detach()));
}

TEST(Optimizer, ShardedAndCompiledStepsAreEagerOnes) {
  auto model = small_net();
  const Tensors eager = train(*model, 8, kEager);
  auto again = small_net();
  int64_t replays = 0;
  const Tensors compiled = train(*again, 8, [&](auto f) {
    auto step = std::make_shared<compiler::Compiled<decltype(f)>>(
        f, compiler::CompileOptions{.name = "signum"});
    return [step, &replays](const Tensor& x, const Tensor& y) {
      Tensor loss = (*step)(x, y);
      replays = step->report().replays;
      return loss;
    };
  });
  EXPECT_GT(replays, 0);
  expect_close(compiled, eager);
  run_ranks(2, [&](ProcessGroup&) {
    auto sharded = small_net();
    parallel::fully_shard(*sharded, {});
    expect_close(train(*sharded, 8, kEager), eager);
  });
}

}  // namespace
