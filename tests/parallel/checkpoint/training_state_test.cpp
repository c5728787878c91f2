// One call saves and restores a run: a run that continues from a save takes exactly the steps of an
// uninterrupted one, on the same or another number of ranks, and what was left out is named.
#include "parallel/checkpoint/training_state.h"

#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "core/core.h"
#include "core/data/compose.h"
#include "parallel/fsdp.h"
#include "parallel/sampler.h"
#include "tests/support/temp_folder.h"

namespace tessera::checkpoint {
namespace {

constexpr int64_t kSteps = 6, kSaved = 3;

std::shared_ptr<data::Dataset> rows() {
  manual_seed(9);
  return std::make_shared<data::TensorDataset>(randn({80, 6}), randint(0, 3, {80}));
}

struct SmallRun {
  explicit SmallRun(ProcessGroup& group, bool sharded = false)
      : model(nn::sequential(nn::linear(6, 8), nn::batch_norm1d({.channels = 8}), nn::dropout(0.2),
                             nn::linear(8, 3))),
        loader(rows(), parallel::distributed_sampler({.dataset_size = 80, .micro_batch_size = 4},
                                                     Ref<ProcessGroup>(&group))) {
    manual_seed(4);
    model->init(2);
    if (sharded) parallel::fully_shard(model);
    optimizer =
        std::make_unique<optim::AdamW>(model->named_parameters(), optim::AdamWOptions{.lr = 0.02});
  }
  TrainingState state() {
    return {
        .model = model.get(), .optimizer = optimizer.get(), .scaler = &scaler, .loader = &loader};
  }
  // The losses of steps begin .. end - 1.
  std::vector<float> train(int64_t begin, int64_t end) {
    std::vector<float> losses;
    for (int64_t step = begin; step < end; ++step) {
      auto batch = loader.next();
      SampleScope samples(batch->sample_numbers);
      Tensor loss = nn::cross_entropy((*model)(batch->inputs), batch->targets);
      optimizer->zero_grad();
      scaler.scale(loss).backward();
      scaler.step(*optimizer);
      scaler.update();
      losses.push_back(loss.item<float>());
    }
    return losses;
  }
  nn::SequentialPtr model;
  data::DataLoader loader;
  std::unique_ptr<optim::Optimizer> optimizer;
  optim::GradScaler scaler;
};

TEST(TrainingState, AResumedRunTakesTheStepsOfOneThatWentOn) {
  for (bool sharded : {false, true}) {
    TempFolder folder;
    run_ranks(sharded ? 2 : 1, [&](ProcessGroup& group) {
      std::vector<float> want;
      {
        SmallRun run(group, sharded);
        Checkpointer saver(folder.str(), &group);
        run.train(0, kSaved);
        run.state().save(saver, kSaved);
        want = run.train(kSaved, kSteps);
        saver.wait();
      }
      SmallRun run(group, sharded);
      TESSERA_ASSERT(!run.state().resume(folder / "none", &group), "nothing is there");
      const std::optional<Loaded> from = run.state().resume(folder.str(), &group);
      TESSERA_ASSERT(from && from->step == kSaved, "step {}", from ? from->step : -1);
      TESSERA_ASSERT(run.train(kSaved, kSteps) == want, "other losses after the save");
    });
  }
}

TEST(TrainingState, WhatIsLeftOutOrMissingIsNamed) {
  TempFolder folder;
  run_ranks(1, [&](ProcessGroup& group) {
    SmallRun run(group);
    TrainingState all = run.state();
    all.tensors = {{"average", zeros({3})}};
    all.extra = {{"note", "first"}};
    {
      Checkpointer saver(folder.str(), &group);
      all.save(saver, 1);
      saver.wait();
    }
    auto error_without = [&](auto change) {
      TrainingState state = all;
      change(state);
      return error_of([&] { state.load(folder.str(), &group); });
    };
    EXPECT_EQ(all.load(folder.str(), &group).extra.at("note"), "first");
    expect_contains(error_without([](auto& s) { s.optimizer = nullptr; }),
                    "it also has an optimizer (optimizer.");
    expect_contains(error_without([](auto& s) { s.optimizer = nullptr; }),
                    "to be given as .optimizer");
    expect_contains(error_without([](auto& s) { s.scaler = nullptr; }),
                    "it also has a loss scale (scaler.");
    expect_contains(error_without([](auto& s) { s.loader = nullptr; }),
                    "it also has a position in the data (data.cursor), to be given as .loader");
    expect_contains(error_without([](auto& s) { s.tensors.clear(); }),
                    "it also has tensors (average), to be given as .tensors");
    expect_contains(error_without([](auto& s) {
                      s.tensors.push_back({"other", zeros({1})});
                    }),
                    "it lacks tensors (other)");
    expect_contains(error_without([](auto& s) {
                      s.tensors.push_back({"model.x", zeros({1})});
                    }),
                    "choose another");
    expect_contains(error_without([](auto& s) { s.extra["data.cursor"] = "7"; }), "choose another");

    // Without strict both are returned; of a part that `only` leaves out nothing is missed.
    TrainingState part = all;
    part.loader = nullptr;
    const Loaded l = part.load(folder.str(), &group, {.strict = false});
    EXPECT_EQ(l.unexpected, std::vector<std::string>{"data.cursor"});
    part.load(folder.str(), &group, {.only = "model.*"});
  });
}

}  // namespace
}  // namespace tessera::checkpoint
