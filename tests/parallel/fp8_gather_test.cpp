// Weights that fully_shard gathers in eight bits: training has the bits that it has without, and
// fewer bytes are moved.
#include <gtest/gtest.h>

#include <cmath>

#include "collectives/decorators/counting.h"
#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/base/deterministic.h"
#include "core/dispatch/default_device.h"
#include "core/nn/nn.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "parallel/ddp.h"
#include "parallel/fp8.h"
#include "parallel/fsdp.h"
#include "parallel/tensor_parallel.h"
#include "tests/support/ranks_on_cards.h"
#include "tests/support/temp_folder.h"

namespace tessera::parallel {
namespace {

constexpr int64_t kRows = 12, kIn = 32, kHidden = 64, kSteps = 4;
constexpr int kBlocks = 3;

nn::Fp8Options in_eight_bits(nn::Fp8Options options = {}) {
  options.gather_in_eight_bits = true;
  return options;
}

// Blocks of two layers, so that every second weight has an input that requires a gradient.
nn::SequentialPtr make(const nn::Fp8Options& options, bool bias = true) {
  auto model = nn::sequential();
  for (int i = 0; i < kBlocks; ++i)
    model->push_back(nn::sequential(nn::linear({.in = kIn, .out = kHidden, .bias = bias}),
                                    nn::tanh(),
                                    nn::linear({.in = kHidden, .out = kIn, .bias = bias})));
  nn::convert_to_fp8(*model, options);
  model->init(7);
  return model;
}
Tensor inputs(int step) { return cast(sample_values({kRows, kIn}, -1, 1, uint64_t(step)), kF32); }

struct Trained {
  std::vector<double> losses;
  std::vector<Tensor> parameters;
};
using Wrap = std::function<void(const nn::SequentialPtr&)>;

// Ranks of `data` share each micro-batch.
Trained train(const nn::Fp8Options& options, ProcessGroup& data, const Wrap& wrap,
              int micro_batches = 2) {
  auto model = make(options);
  wrap(model);
  optim::AdamW opt(model->parameters(), {.lr = 0.01});
  Trained out;
  for (int step = 0; step < kSteps; ++step) {
    opt.zero_grad();
    for (int batch = 0; batch < micro_batches; ++batch) {
      const int64_t rows = kRows / data.size();
      const Tensor x = narrow(inputs(2 * step + batch), 0, data.rank() * rows, rows);
      const Tensor loss = mean(square((*model)(x)-x));
      backward(loss);
      out.losses.push_back(full_tensor(loss.detach()).item<double>());
    }
    opt.step();
    nn::update_fp8_scales(*model, Ref<ProcessGroup>(&data));
  }
  for (const Tensor& p : model->parameters()) out.parameters.push_back(full_tensor(p.detach()));
  return out;
}
void check_equal(const Trained& got, const Trained& want, const std::string& what) {
  TESSERA_CHECK(got.losses == want.losses, "{}: losses differ", what);
  for (size_t i = 0; i < want.parameters.size(); ++i)
    TESSERA_CHECK(equal(got.parameters[i], want.parameters[i]), "{}: parameter {}", what, i);
}

const std::vector<nn::Fp8Options> kRecipes{
    {},
    {.recipe = nn::Fp8Recipe::kDelayed, .history = 2},
    {.power_of_two_scales = true},
    {.recipe = nn::Fp8Recipe::kDelayed, .power_of_two_scales = true}};

// Ranks quantise by the scale of the whole weight, so nothing is rounded in another way than on
// ranks that have all of it, be they sharded or not.
TEST(Fp8Gather, TrainingHasTheBitsOfReplicasAndOfWholeWeights) {
  for (int ranks : {2, 3, 4})  // three cut rows unevenly
    run_ranks(ranks, [&](ProcessGroup& group) {
      const auto sharded = [&](FsdpOptions options) -> Wrap {
        options.mesh = init_device_mesh({{"dp", group.size()}});
        return [options](const nn::SequentialPtr& m) { fully_shard(*m, options); };
      };
      for (size_t i = 0; i < kRecipes.size(); ++i) {
        const nn::Fp8Options& recipe = kRecipes[i];
        const auto what = [&](const char* how) { return fmt::format("recipe {}, {}", i, how); };
        const nn::Fp8Options eight = in_eight_bits(recipe);
        const Wrap replicated = [&](const nn::SequentialPtr& m) {
          ddp(m, {.group = Ref<ProcessGroup>(&group)});
        };
        check_equal(train(eight, group, sharded({}), 1), train(recipe, group, replicated, 1),
                    what("replicas"));
        const Trained whole = train(recipe, group, sharded({}));
        check_equal(train(eight, group, sharded({})), whole, what("in eight bits"));
        check_equal(train(eight, group, sharded({.reshard_after_forward = false})), whole,
                    what("kept"));
        check_equal(train(eight, group, sharded({.prefetch = false})), whole, what("late"));
        check_equal(train(eight, group,
                          sharded({.shard_dim = [](const std::string&,
                                                   const Tensor& t) { return t.ndim() - 1; }})),
                    whole, what("cut by columns"));
        check_equal(train(eight, group,
                          [&](const nn::SequentialPtr& m) {
                            sharded({})(m);
                            for (auto& [path, block] : nn::numbered_modules(*m)) block->recompute();
                          }),
                    whole, what("recomputed"));
      }
    });
}

TEST(Fp8Gather, TensorParallelWeightsHaveOneScaleToo) {
  run_ranks(4, [&](ProcessGroup&) {
    const DeviceMesh mesh = init_device_mesh({{"dp", 2}, {"tp", 2}});
    const Wrap wrap = [&](const nn::SequentialPtr& m) {
      parallelize_module(*m, mesh["tp"], {{"*", pairwise()}});
      fully_shard(*m, {.mesh = mesh["dp"]});
    };
    for (const nn::Fp8Options& recipe : kRecipes) {
      ProcessGroup& data = *mesh.group("dp");
      ReplicatePlain same;
      check_equal(train(in_eight_bits(recipe), data, wrap), train(recipe, data, wrap), "tp");
    }
  });
}

struct Moved {
  int64_t gathered, gathers, reductions;  // bytes and calls of a step
};
Moved moved(ProcessGroup& group, const nn::Fp8Options& options, FsdpOptions fsdp) {
  auto counting = make_ref<CountingGroup>(Ref<ProcessGroup>(&group));
  fsdp.mesh = init_device_mesh({{"dp", group.size()}}, counting);
  auto model = make(options, /*bias=*/false);
  fully_shard(*model, fsdp);
  optim::AdamW opt(model->parameters(), {.lr = 0.01});
  const auto step = [&] {
    opt.zero_grad();
    for (int half = 0; half < 2; ++half) backward(mean(square((*model)(inputs(half)))));
    opt.step();
  };
  step();
  const CollectiveCounts& c = counting->counts();
  const auto now = [&] {
    return Moved{c.bytes(CollKind::kAllGather), c.calls(CollKind::kAllGather),
                 c.calls(CollKind::kAllReduce)};
  };
  const Moved before = now();
  step();
  const Moved after = now();
  return {after.gathered - before.gathered, after.gathers - before.gathers,
          after.reductions - before.reductions};
}

TEST(Fp8Gather, MovesHalfTheBytesOfSixteenBitsAndOneAllReduceAStep) {
  run_ranks(2, [&](ProcessGroup& group) {
    const Moved single = moved(group, {}, {}),
                half = moved(group, {}, {.precision = {.param = kBF16, .reduce = kF32}}),
                eight = moved(group, in_eight_bits(), {}),
                both =
                    moved(group, in_eight_bits(), {.precision = {.param = kBF16, .reduce = kF32}});
    // Forward and backward of two micro-batches; the first weight is not read in backward, but
    // gathered with its block.
    const int64_t weights = 2 * kBlocks * kIn * kHidden;
    EXPECT_EQ(eight.gathered, 2 * 2 * weights / 2);
    EXPECT_EQ(half.gathered, 2 * eight.gathered);
    EXPECT_EQ(single.gathered, 4 * eight.gathered);
    EXPECT_EQ(both.gathered, eight.gathered);
    for (const Moved& m : {half, eight, both}) EXPECT_EQ(m.gathers, single.gathers);
    EXPECT_EQ(single.reductions, 0);
    EXPECT_EQ(half.reductions, 0);
    EXPECT_EQ(eight.reductions, 1) << "for all weights and both micro-batches";
    EXPECT_EQ(both.reductions, 1);
  });
}

TEST(Fp8Gather, TakesAQuarterOfTheMemory) {
  run_ranks(2, [&](ProcessGroup&) {
    const auto peak = [](const nn::Fp8Options& options) {
      auto model = make(options, /*bias=*/false);
      auto fsdp = fully_shard(*model, {.mesh = init_device_mesh({{"dp", 2}})});
      backward(mean(square((*model)(inputs(0)))));
      TESSERA_CHECK(fsdp->memory().gathered == 0, "weights are left");
      return fsdp->memory().gathered_peak;
    };
    EXPECT_EQ(peak({}), 4 * peak(in_eight_bits()));
  });
}

// A NaN of one rank's piece shows in the results of all.
TEST(Fp8Gather, WhatIsNotFiniteShowsOnEveryRank) {
  for (const nn::Fp8Options& recipe : kRecipes)
    for (float wrong : {INFINITY, NAN})
      run_ranks(2, [&](ProcessGroup& group) {
        auto model = make(in_eight_bits(recipe));
        fully_shard(*model, {.mesh = init_device_mesh({{"dp", 2}})});
        (*model)(inputs(0));
        nn::update_fp8_scales(*model, Ref<ProcessGroup>(&group));
        NoGrad off;
        if (group.rank() == 1)
          fill_(narrow(local_of(model->parameters()[0]).detach()[0], 0, 0, 1), double(wrong));
        else
          fill_(narrow(local_of(model->parameters()[0]).detach()[0], 0, 0, 0),
                0.0);  // a write, too
        for (const Tensor& y : {(*model)(inputs(0))}) EXPECT_TRUE(std::isnan(sum(y).item<float>()));
      });
}

Tensor weight_of(nn::Module& model) { return model.slot("1.0.weight"); }

TEST(Fp8Gather, CodeThatNeedsValuesIsToldWhatToDo) {
  run_ranks(2, [&](ProcessGroup&) {
    auto model = make(in_eight_bits());
    auto fsdp = fully_shard(*model, {.mesh = init_device_mesh({{"dp", 2}})});
    std::string error;
    nn::HookHandle hook = model->submodule("1.0").add_pre_hook([&](nn::Module&, Inputs) {
      error = error_of([&] { amax(weight_of(*model).detach()).item<float>(); });
    });
    backward(sum((*model)(inputs(0))));
    expect_contains(error, "1.0.weight was gathered in eight bits");
    hook.remove();
    fsdp->unshard();
    backward(sum((*model)(inputs(0))));
    EXPECT_NE(amax(weight_of(*model).detach()).item<float>(), 0);
    const Tensor whole = clone(weight_of(*model).detach());
    fsdp->reshard();
    EXPECT_TRUE(equal(whole, full_tensor(weight_of(*model).detach())));
    // Written while it is whole; the next forward quantises the new values.
    const Tensor before = (*model)(inputs(0)).detach();
    fsdp->unshard();
    {
      NoGrad off;
      fill_(weight_of(*model), 0.0);
    }
    fsdp->reshard();
    EXPECT_FALSE(equal((*model)(inputs(0)).detach(), before));
  });
}

// Where forward finds whole weights, layers quantise what was gathered, which may be rounded.
TEST(Fp8Gather, UnshardMayComeBetweenForwardAndBackward) {
  run_ranks(2, [&](ProcessGroup&) {
    const auto gradients = [&](const nn::Fp8Options& options, int between,
                               const MixedPrecision& precision) {
      auto model = make(options);
      auto fsdp =
          fully_shard(*model, {.mesh = init_device_mesh({{"dp", 2}}), .precision = precision});
      if (between == 2) fsdp->unshard();
      const Tensor loss = sum(square((*model)(inputs(0))));
      if (between == 1) fsdp->unshard();
      if (between == 2) fsdp->reshard();
      backward(loss);
      if (between == 1) fsdp->reshard();
      std::vector<Tensor> all;
      for (const Tensor& p : model->parameters()) all.push_back(full_tensor(p.grad()));
      return all;
    };
    for (const MixedPrecision& precision : {MixedPrecision{}, {.param = kBF16}}) {
      const auto quantised = gradients(in_eight_bits(), 0, precision),
                 whole = gradients({}, 0, precision);
      EXPECT_EQ(equal(quantised[0], whole[0]), !precision.param);
      for (int between : {1, 2}) {
        const auto got = gradients(in_eight_bits(), between, precision);
        const auto& want = between == 1 ? quantised : whole;
        for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(equal(got[i], want[i])) << between;
      }
    }
  });
}

TEST(Fp8Gather, AHistoryThatMovesOnBeforeBackwardIsRefused) {
  std::string error;
  try {
    run_ranks(2, [&](ProcessGroup& group) {
      auto model = make(in_eight_bits({.recipe = nn::Fp8Recipe::kDelayed}));
      fully_shard(*model, {.mesh = init_device_mesh({{"dp", 2}})});
      const Tensor loss = sum((*model)(inputs(0)));
      nn::update_fp8_scales(*model, Ref<ProcessGroup>(&group));
      backward(loss);
    });
  } catch (const std::exception& e) {
    error = e.what();
  }
  expect_contains(error, "call update_fp8_scales() after backward");
}

TEST(Fp8Gather, OffloadIsRefused) {
  run_ranks(2, [&](ProcessGroup&) {
    auto model = make(in_eight_bits());
    const FsdpOptions options{.mesh = init_device_mesh({{"dp", 2}}), .offload = true};
    expect_contains(error_of([&] { fully_shard(*model, options); }),
                    "offload of 0.0.weight, which is to be gathered in eight bits");
  });
}

// What else reads a tied weight needs its values.
TEST(Fp8Gather, TiedWeightsAreGatheredAsTheyAre) {
  run_ranks(2, [&](ProcessGroup& group) {
    auto counting = make_ref<CountingGroup>(Ref<ProcessGroup>(&group));
    auto model = nn::sequential(nn::linear({.in = 32, .out = 32, .bias = false}),
                                nn::linear({.in = 32, .out = 32, .bias = false}));
    nn::convert_to_fp8(*model, in_eight_bits());
    model->slot("1.weight") = model->slot("0.weight");
    fully_shard(*model, {.mesh = init_device_mesh({{"dp", 2}}, counting)});
    backward(sum((*model)(inputs(0))));
    EXPECT_EQ(counting->counts().bytes(CollKind::kAllGather), 32 * 32 * 4 / 2);
    EXPECT_EQ(counting->counts().calls(CollKind::kAllReduce), 0);
  });
}

// A rank that alone wrote a weight computes its scale anew, and the others gather.
void write_alone(ProcessGroup& group) {
  auto model = make(in_eight_bits());
  model->to(default_device());
  fully_shard(*model, {.mesh = init_device_mesh({{"dp", group.size()}})});
  const auto forward = [&] { sum((*model)(inputs(0).to(default_device()))).item<float>(); };
  forward();
  if (group.rank() == 1) {
    NoGrad off;
    fill_(local_of(model->parameters()[0]).detach(), 0.5);
  }
  forward();
}
std::string comm_error_of(FunctionRef<void()> f) {
  try {
    f();
  } catch (const CommError& e) {
    return e.what();
  }
  return "no error";
}

TEST(Fp8Gather, ARankThatWritesAWeightAloneIsNamed) {
  const std::string error = comm_error_of([] { run_ranks(3, write_alone); });
  expect_contains(error, "rank 1 called all_reduce(max, 6 elements of f32) at fsdp_fp8.cpp:");
  expect_contains(error, "ranks 0, 2 called all_gather(");
}

class Fp8GatherOnCards : public test::RanksWithCards {};

TEST_F(Fp8GatherOnCards, ARankThatWritesAWeightAloneIsNamed) {
  const std::string error = comm_error_of([&] { run_on_cards(2, write_alone); });
  expect_contains(error, "rank 1 called all_reduce(max, 6 elements of f32) at fsdp_fp8.cpp:");
  expect_contains(error, "rank 0 called all_gather(");
}

// In NCCL's memory, from which groups of parameters are gathered by one launch.
TEST_F(Fp8GatherOnCards, TrainingHasTheBitsOfWholeWeights) {
  run_ranks(2, [&](ProcessGroup& group) {
    const Device card = this->card(group.rank());
    const DeviceScope scope(card);
    const DeterministicScope deterministic(true);
    int64_t rooms = 0, bytes = 0;
    const auto trained = [&](const nn::Fp8Options& options) {
      auto counting = make_ref<CountingGroup>(Ref<ProcessGroup>(&group));
      auto model = make(options, /*bias=*/false);
      model->to(card);
      auto fsdp = fully_shard(*model, {.mesh = init_device_mesh({{"dp", 2}}, counting)});
      optim::SGD opt(model->parameters(), {.lr = 0.1});
      for (int step = 0; step < 3; ++step) {
        opt.zero_grad();
        backward(mean(square((*model)(inputs(step).to(card)))));
        opt.step();
        nn::update_fp8_scales(*model, Ref<ProcessGroup>(&group));
      }
      rooms = fsdp->memory().rooms;
      bytes = counting->counts().bytes(CollKind::kAllGather);
      std::vector<Tensor> all;
      for (const Tensor& p : model->parameters()) all.push_back(full_tensor(p.detach()).cpu());
      return all;
    };
    for (const nn::Fp8Options& recipe : kRecipes) {
      const auto want = trained(recipe);
      const int64_t rooms_of_whole = rooms, bytes_of_whole = bytes;
      const auto got = trained(in_eight_bits(recipe));
      for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(equal(got[i], want[i])) << i;
      EXPECT_EQ(bytes_of_whole, 4 * bytes);
      EXPECT_LT(rooms, rooms_of_whole);
    }
  });
}

}  // namespace
}  // namespace tessera::parallel
