// Data parallelism compared with one rank: gradients, accumulation, unused parameters, and equal
// bits with the tree.
#include "parallel/ddp.h"

#include <gtest/gtest.h>

#include <mutex>

#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "tests/support/checkpointed.h"
#include "tests/support/unreliable.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 8, kIn = 5, kOut = 3;

nn::SequentialPtr make_model() {
  auto model = nn::sequential(nn::linear(kIn, 16), nn::tanh(), nn::linear(16, kOut));
  model->init(7);
  return model;
}

Tensor inputs() { return randn({kBatch, kIn}, {kF32}, from_values<int64_t>({1, 1}, {2})); }

// The loss is the mean over the rows [begin, begin + count) of the batch.
Tensor loss_of(nn::Module& model, int64_t begin, int64_t count) {
  return mean(square(model(narrow(inputs(), 0, begin, count))));
}

std::vector<float> flat_grads(nn::Module& model) {
  std::vector<float> all;
  for (const Tensor& p : model.parameters()) {
    Tensor g = contiguous(p.grad());
    all.insert(all.end(), g.data<float>(), g.data<float>() + g.numel());
  }
  return all;
}

std::vector<float> serial_grads() {
  auto model = make_model();
  loss_of(*model, 0, kBatch).backward();
  return flat_grads(*model);
}

// Returns the gradients of `ranks` ranks with `micro_batches` micro-batches each; they must be the
// same on every rank.
std::vector<float> ddp_grads(int ranks, int64_t micro_batches, parallel::DdpOptions options,
                             int steps = 1) {
  std::vector<std::vector<float>> grads(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](ProcessGroup& group) {
    auto model = make_model();
    parallel::DdpOptions o = options;
    o.group = Ref<ProcessGroup>(&group);
    auto ddp = parallel::ddp(model, o);
    int64_t rows = kBatch / ranks / micro_batches;
    for (int s = 0; s < steps; ++s) {
      for (int64_t k = 0; k < micro_batches; ++k) {
        auto scope = ddp->no_sync(k + 1 < micro_batches);
        Tensor loss = loss_of(*model, (group.rank() * micro_batches + k) * rows, rows);
        (loss * (1.0 / double(micro_batches))).backward();
      }
      grads[size_t(group.rank())] = flat_grads(*model);
      model->zero_grad();
    }
  });
  for (const auto& g : grads) EXPECT_EQ(g, grads[0]);
  return grads[0];
}

void expect_close(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-6) << "element " << i;
}

TEST(Ddp, GradientsEqualSerial) {
  std::vector<float> serial = serial_grads();
  for (int ranks : {1, 2, 4, 8}) expect_close(ddp_grads(ranks, 1, {}), serial);
}

// A program may drop the result of ddp; the model keeps it alive.
TEST(Ddp, TheModelKeepsItAlive) {
  const std::vector<float> serial = serial_grads();
  run_ranks(2, [&](ProcessGroup& group) {
    auto model = make_model();
    parallel::ddp(*model, {.group = Ref<ProcessGroup>(&group)});
    loss_of(*model, group.rank() * kBatch / 2, kBatch / 2).backward();
    expect_close(flat_grads(*model), serial);
  });
  EXPECT_THROW(parallel::ddp(nn::SequentialPtr()), UserError);
}

TEST(Ddp, SmallBucketsAndRebuiltOrderChangeNothing) {
  std::vector<float> serial = serial_grads();
  for (size_t bytes : {size_t(1), size_t(64), size_t(256)})
    expect_close(ddp_grads(2, 1, {.bucket_bytes = bytes}, 3), serial);
}

// The gradients of two weights of one shape become ready in an order that differs between ranks:
// the buckets that are built after the first step have them in the order of rank 0 everywhere.
TEST(Ddp, BucketsFollowRankZeroWhereRanksDisagree) {
  for (size_t bytes : {size_t(1), size_t(1) << 20})  // a bucket each, and both in one
    run_ranks(2, [&](ProcessGroup& group) {
      auto model = nn::sequential(nn::linear({.in = 2, .out = 2, .bias = false}),
                                  nn::linear({.in = 2, .out = 2, .bias = false}));
      auto ddp = parallel::ddp(model, {.group = Ref<ProcessGroup>(&group), .bucket_bytes = bytes});
      std::vector<Tensor> w = model->parameters();
      for (int step = 0; step < 3; ++step) {
        // The gradient of a weight is all `factor`; backward reaches what came last first.
        const double mine = group.rank() == 0 ? 1 : 3;
        const bool turned = group.rank() == 1;
        Tensor first = sum(w[turned]) * (turned ? 10 * mine : mine),
               second = sum(w[!turned]) * (turned ? mine : 10 * mine);
        (first + second).backward();
        for (int i : {0, 1})
          for (int64_t k = 0; k < 4; ++k)
            EXPECT_EQ(w[size_t(i)].grad().data<float>()[k], i == 0 ? 2 : 20)
                << "weight " << i << " at step " << step << " on rank " << group.rank();
        model->zero_grad();
      }
    });
}

TEST(Ddp, NoSyncAccumulates) { expect_close(ddp_grads(2, 4, {}), serial_grads()); }

// Eight micro-batches of one row each, on any number of ranks.
TEST(Ddp, TreeGivesEqualBitsOnAnyNumberOfRanks) {
  parallel::DdpOptions tree{.bucket_bytes = 128, .tree_accumulation = true};
  std::vector<float> one = ddp_grads(1, 8, tree);
  expect_close(one, serial_grads());
  for (int ranks : {2, 4, 8})
    EXPECT_EQ(ddp_grads(ranks, 8 / ranks, tree, 2), one) << ranks << " ranks";
}

TEST(Ddp, ParametersOfRankZeroAreBroadcast) {
  run_ranks(3, [&](ProcessGroup& group) {
    auto model = nn::sequential(nn::linear(2, 2));
    model->init(uint64_t(group.rank()));
    auto ddp = parallel::ddp(model, {.group = Ref<ProcessGroup>(&group)});
    auto reference = nn::sequential(nn::linear(2, 2));
    reference->init(0);
    EXPECT_EQ(model->parameters()[0].data<float>()[1], reference->parameters()[0].data<float>()[1]);
  });
}

struct TwoHeads final : nn::Module {
  TwoHeads() {
    used = register_module("used", nn::linear(2, 1)),
    spare = register_module("spare", nn::linear(2, 1));
  }
  nn::LinearPtr used, spare;
};

TEST(Ddp, UnusedParametersAreNamed) {
  std::mutex mutex;
  std::string text;
  EXPECT_THROW(run_ranks(2,
                         [&](ProcessGroup& group) {
                           auto model = std::make_shared<TwoHeads>();
                           auto ddp = parallel::ddp(model, {.group = Ref<ProcessGroup>(&group)});
                           try {
                             sum((*model->used)(ones({1, 2}))).backward();
                           } catch (const UserError& e) {
                             std::lock_guard lock(mutex);
                             text = e.what();
                             throw;
                           }
                         }),
               Error);
  EXPECT_NE(text.find("spare.weight"), std::string::npos) << text;
  EXPECT_NE(text.find("allow_unused"), std::string::npos) << text;
}

// Two layers with one between them whose backward fails: the second layer's gradients arrive, the
// first's do not.
struct Breakable final : nn::Module {
  Breakable() {
    first = register_module("first", nn::linear(kIn, 4)),
    second = register_module("second", nn::linear(4, kOut));
    init(7);
  }
  Tensor loss(int64_t begin, int64_t count) {
    Tensor h = (*first)(narrow(inputs(), 0, begin, count));
    h = apply_function(make_ref<Unreliable>(fails), {&h, 1})[0];
    return mean(square((*second)(h)));
  }
  nn::LinearPtr first, second;
  bool fails = false;
};

// No other rank waits for the backward: there is one rank, or sync is off.
TEST(Ddp, AStepWhoseBackwardFailedCanBeTakenAgain) {
  Breakable serial;
  serial.loss(0, kBatch).backward();
  const std::vector<float> want = flat_grads(serial);
  for (auto [ranks, tree] : {std::pair{1, false}, {1, true}, {2, false}, {2, true}})
    run_ranks(ranks, [&](ProcessGroup& group) {
      const int64_t failing = ranks == 1 ? 1 : 0, rows = kBatch / ranks / 2;
      auto model = std::make_shared<Breakable>();
      auto ddp =
          parallel::ddp(model, {.group = Ref<ProcessGroup>(&group), .tree_accumulation = tree});
      for (int step = 0; step < 3; ++step) {
        for (bool fails : {true, false}) {
          model->fails = fails;
          model->zero_grad();
          for (int64_t k = 0; k < 2; ++k) {
            auto scope = ddp->no_sync(k == 0);
            model->fails = fails && k == failing;
            Tensor loss = model->loss((group.rank() * 2 + k) * rows, rows) * 0.5;
            if (!model->fails) {
              loss.backward();
              continue;
            }
            EXPECT_THROW(loss.backward(), UserError);
            break;
          }
        }
        expect_close(flat_grads(*model), want);
      }
    });
}

TEST(Ddp, ABackwardThatFailsBetweenBucketsAbortsTheGroup) {
  std::mutex mutex;
  std::vector<std::string> texts;
  EXPECT_THROW(run_ranks(2,
                         [&](ProcessGroup& group) {
                           auto model = std::make_shared<Breakable>();
                           auto ddp = parallel::ddp(
                               model, {.group = Ref<ProcessGroup>(&group), .bucket_bytes = 1});
                           model->fails = group.rank() == 0;
                           try {
                             model->loss(0, 2).backward();
                             for (const Tensor& p : model->parameters()) p.grad().data<float>();
                           } catch (const CommError& e) {
                             std::lock_guard lock(mutex);
                             texts.push_back(e.what());
                             throw;
                           }
                         }),
               Error);
  ASSERT_EQ(texts.size(), 1u) << "rank 1 hears why; rank 0 has its own error";
  EXPECT_NE(texts[0].find("a backward failed when 2 of 4 buckets were sent: unreliable"),
            std::string::npos)
      << texts[0];
}

TEST(Ddp, AllowedUnusedParametersCountAsZero) {
  run_ranks(2, [&](ProcessGroup& group) {
    auto model = std::make_shared<TwoHeads>();
    model->init(3);
    auto ddp = parallel::ddp(model, {.group = Ref<ProcessGroup>(&group), .allow_unused = true});
    // Each rank uses another head: the mean halves both gradients.
    auto& head = group.rank() == 0 ? model->used : model->spare;
    sum((*head)(ones({1, 2}))).backward();
    for (const Tensor& p : model->parameters()) EXPECT_EQ(p.grad().data<float>()[0], 0.5f);
  });
}

// Without zero_grad in between, a second backward adds to the averaged gradient, as on one rank;
// also across the step in which buckets are rebuilt.
TEST(Ddp, ASecondBackwardAccumulates) {
  std::vector<float> twice = serial_grads();
  for (float& g : twice) g *= 2;
  run_ranks(2, [&](ProcessGroup& group) {
    auto model = make_model();
    auto ddp = parallel::ddp(model, {.group = Ref<ProcessGroup>(&group), .bucket_bytes = 128});
    for (int i = 0; i < 2; ++i) loss_of(*model, group.rank() * kBatch / 2, kBatch / 2).backward();
    expect_close(flat_grads(*model), twice);
  });
}

// The reducer is told that a backward has finished when the outermost one has.
TEST(Ddp, ABackwardInsideOfAnotherDeliversToo) {
  for (int ranks : {1, 2})
    run_ranks(ranks, [&](ProcessGroup& group) {
      auto first = nn::linear(kIn, 16), second = nn::linear(16, kOut);
      auto model = nn::sequential(first, nn::tanh(), second);
      model->init(7);
      auto ddp = parallel::ddp(model, {.group = Ref<ProcessGroup>(&group), .bucket_bytes = 128});
      const int64_t rows = kBatch / ranks;
      Tensor x = narrow(inputs(), 0, group.rank() * rows, rows);
      auto loss = [&] {
        Tensor h = tanh((*first)(x));
        return mean(square(checkpointed(h, [&](auto& t) { return (*second)(t); })));
      };
      loss().backward();
      expect_close(flat_grads(*model), serial_grads());
      if (ranks > 1) return;
      try {
        (loss() + sum(second->weight)).backward();
        ADD_FAILURE() << "two gradients of one parameter were taken";
      } catch (const UserError& e) {
        EXPECT_NE(std::string(e.what()).find("two gradients in one backward"), std::string::npos)
            << e.what();
      }
    });
}

TEST(Ddp, TheTreeAsksForZeroGrad) {
  auto model = make_model();
  auto ddp = parallel::ddp(model, {.tree_accumulation = true});
  loss_of(*model, 0, kBatch).backward();
  EXPECT_THROW(loss_of(*model, 0, kBatch).backward(), UserError);
}

TEST(Ddp, CountWeightedMean) {
  run_ranks(2, [&](ProcessGroup& group) {
    int64_t count = group.rank() == 0 ? 6 : 2;
    EXPECT_DOUBLE_EQ(parallel::count_weight(group, count), group.rank() == 0 ? 1.5 : 0.5);
    EXPECT_EQ(parallel::count_weight(group, 0), 0);
  });
}

TEST(Ddp, AParameterBelongsToOneReducer) {
  auto model = make_model();
  auto first = parallel::ddp(model, {});
  EXPECT_THROW((void)parallel::ddp(model, {}), UserError);
}

}  // namespace
}  // namespace tessera
