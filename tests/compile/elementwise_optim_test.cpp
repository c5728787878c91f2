// Optimizers made of ordinary ops: after some steps, parameters are those of eager steps on one
// rank, whether steps are compiled or not, parameters are cut over ranks or not, and also if the
// state is moved to a new optimizer.
#include <gtest/gtest.h>

#include <cmath>

#include "collectives/loopback/run_ranks.h"
#include "compile/compile.h"
#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/update.h"
#include "core/optim/optim.h"
#include "dtensor/dtensor.h"
#include "parallel/fsdp.h"
#include "tests/support/temp_folder.h"

namespace tessera::compiler {
namespace {

using Make = std::function<std::unique_ptr<optim::Optimizer>(std::vector<NamedTensor>)>;

std::vector<std::pair<std::string, Make>> all_optimizers() {
  using namespace optim;
  return {{"rmsprop",
           [](auto p) {
             return std::make_unique<RMSprop>(
                 p, RMSpropOptions{.weight_decay = 0.1, .momentum = 0.9, .centered = true});
           }},
          {"adagrad",
           [](auto p) {
             return std::make_unique<Adagrad>(p,
                                              AdagradOptions{.lr_decay = 0.1, .weight_decay = 0.1});
           }},
          {"lion", [](auto p) {
             return std::make_unique<Lion>(p, LionOptions{.lr = 1e-2, .weight_decay = 0.1});
           }}};
}

struct How {
  bool compiled = false, sharded = false, saved = false;
};

// All parameters after six steps, the fourth of which is not finite and changes nothing.
std::vector<Tensor> train(const Make& make, const How& how, int64_t* replays = nullptr) {
  auto model = nn::sequential(nn::linear(3, 5), nn::gelu(), nn::linear(5, 1));
  for (const NamedTensor& p : model->named_parameters()) {
    NoGrad off;
    assign_(p.tensor, sample_values(p.tensor.shape(), -1, 1, uint64_t(p.tensor.numel())));
  }
  model->to(kF64);
  if (how.sharded) parallel::fully_shard(*model);
  auto opt = make(model->named_parameters());
  const Tensor x = sample_values({6, 3}, -1, 1, 5);
  auto step = [&](const Tensor& scale) {
    Tensor loss = mean(square((*model)(x)-1.0));
    opt->zero_grad();
    loss.backward();
    const optim::Clip clip = optim::clip_grad_norm(model->parameters(), 0.5);
    opt->step_if_finite(clip.scale * scale);
    return full_tensor(loss.detach());
  };
  auto compiled = compile(step);
  for (int k = 0; k < 6; ++k) {
    opt->set_lr(0.01 / (k + 1));
    const Tensor scale = scalar_tensor(k == 3 ? INFINITY : 1.0, kF64);
    how.compiled ? compiled(scale) : step(scale);
    if (how.saved && k == 2) {
      std::vector<NamedTensor> state;
      for (const NamedTensor& t : opt->named_state()) state.push_back({t.name, t.tensor.clone()});
      opt = make(model->named_parameters());
      opt->load_state(state);
    }
  }
  if (replays) *replays = compiled.report().replays;
  std::vector<Tensor> out;
  for (const Tensor& p : model->parameters()) out.push_back(full_tensor(p.detach()));
  return out;
}

void expect_close(const std::vector<Tensor>& got, const std::vector<Tensor>& want,
                  const std::string& what) {
  for (size_t i = 0; i < want.size(); ++i)
    EXPECT_LE(amax(abs(got[i] - want[i])).item<double>(), 1e-12) << what << ", parameter " << i;
}

TEST(ElementwiseOptim, CompiledAndShardedAsOnOneRank) {
  for (const auto& [name, make] : all_optimizers()) {
    const std::vector<Tensor> want = train(make, {});
    expect_close(train(make, {.saved = true}), want, name + " loaded");
    int64_t replays = 0;
    expect_close(train(make, {.compiled = true}, &replays), want, name + " compiled");
    EXPECT_GE(replays, 3) << name;
    run_ranks(2, [&](ProcessGroup&) {
      expect_close(train(make, {.sharded = true}), want, name + " sharded");
      expect_close(train(make, {.sharded = true, .saved = true}), want, name + " sharded, loaded");
      expect_close(train(make, {.compiled = true, .sharded = true}), want,
                   name + " sharded, compiled");
    });
  }
}

}  // namespace
}  // namespace tessera::compiler
