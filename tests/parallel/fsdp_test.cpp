// Fully sharded training of a small GPT, compared with serial training of the same model.
#include "parallel/fsdp.h"

#include <gtest/gtest.h>

#include <functional>
#include <optional>

#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/nn/nn.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/update.h"
#include "core/tensor/random.h"
#include "tests/parallel/small_gpt.h"
#include "tests/support/temp_folder.h"

namespace tessera::parallel {
namespace {

using test::check_close;
using test::ids;
using test::Trained;

models::GptOptions small() { return test::small_gpt(); }

using Wrap = std::function<void(models::Gpt&)>;

Trained train(ProcessGroup* group, const Wrap& wrap, int micro = 1, DType dtype = kF64) {
  test::TrainOptions o{.micro_batches = micro, .dtype = dtype};
  if (group) o.dp_ranks = group->size(), o.dp_rank = group->rank();
  return test::train(wrap, o);
}

TEST(Fsdp, TrainsAsSerial) {
  Trained serial = train(nullptr, nullptr);
  for (int ranks : {1, 2, 4, 8})  // rows of 19, 10 and 6 do not divide; 8 ranks leave empty pieces
    for (bool reshard : {true, false})
      run_ranks(ranks, [&](ProcessGroup& group) {
        Trained t = train(&group, [&](nn::Module& m) {
          return fully_shard(m, {.reshard_after_forward = reshard, .prefetch = reshard});
        });
        check_close(t, serial, 1e-10);
      });
}

TEST(Fsdp, AnyDimAndAnyGroups) {
  Trained serial = train(nullptr, nullptr);
  run_ranks(4, [&](ProcessGroup& group) {
    FsdpOptions o;
    o.shard_dim = [](const std::string&, const Tensor& p) { return p.ndim() - 1; };
    o.groups = {"h.*.attn", "h.*.mlp"};
    check_close(train(&group, [&](nn::Module& m) { return fully_shard(m, o); }), serial, 1e-10);
  });
}

TEST(Fsdp, HybridShardingTrainsAsSerial) {
  Trained serial = train(nullptr, nullptr);
  run_ranks(4, [&](ProcessGroup& group) {
    DeviceMesh mesh = init_device_mesh({{"replicate", 2}, {"shard", 2}});
    check_close(train(&group, [&](nn::Module& m) { return fully_shard(m, {.mesh = mesh}); }),
                serial, 1e-10);
  });
}

TEST(Fsdp, MicroBatchesAccumulate) {
  Trained serial = train(nullptr, nullptr);
  run_ranks(2, [&](ProcessGroup& group) {
    for (bool tree : {false, true})
      check_close(
          train(
              &group, [&](nn::Module& m) { return fully_shard(m, {.tree_accumulation = tree}); },
              4),
          serial, 1e-10);
  });
}

TEST(Fsdp, AccumulationWithoutSyncReducesOnce) {
  run_ranks(2, [&](ProcessGroup& group) {
    manual_seed(3);
    auto model = models::gpt(small());
    auto fsdp = fully_shard(*model);
    fsdp->set_sync(false);
    backward(model->loss(ids(0, group.rank() * 2, 2), ids(100, group.rank() * 2, 2)) * 0.5);
    for (const Tensor& p : model->parameters())
      TESSERA_CHECK(!p.grad().defined(), "a gradient without sync");
    fsdp->set_sync(true);
    backward(model->loss(ids(0, 4 + group.rank() * 2, 2), ids(100, 4 + group.rank() * 2, 2)) * 0.5);
    std::vector<Tensor> got;
    for (const Tensor& p : model->parameters()) got.push_back(full_tensor(p.grad()));
    manual_seed(3);
    auto serial = models::gpt(small());
    backward(serial->loss(ids(0, 0, 8), ids(100, 0, 8)));
    size_t i = 0;
    for (const Tensor& p : serial->parameters())
      TESSERA_CHECK(amax(abs(p.grad() - got[i++])).item<double>() < 1e-5, "gradient {}", i);
  });
}

struct TwoHeads final : nn::Module {
  TwoHeads() {
    used = register_module("used", nn::linear(2, 4));
    spare = register_module("spare", nn::linear(2, 4));
    init(7);
  }
  Tensor forward(Tensor x) override {
    const Tensor y = (*used)(x);
    return both ? y + (*spare)(x)*2.0 : y;
  }
  nn::LinearPtr used, spare;
  bool both = false;
};

TEST(Fsdp, UnusedParametersAreNamed) {
  const std::string e = error_of([] {
    run_ranks(2, [](ProcessGroup&) {
      TwoHeads model;
      fully_shard(model);
      backward(sum(model(ones({1, 2}))));
    });
  });
  expect_contains(e, "got no gradient in this backward: spare.weight, spare.bias; leave them out");
}

// A parameter that an earlier backward without sync has reached is not unused.
TEST(Fsdp, PartsOfAGroupMayGetTheirGradientsInEarlierBackwards) {
  run_ranks(2, [](ProcessGroup&) {
    TwoHeads model;
    auto fsdp = fully_shard(model);
    for (bool last : {false, true}) {
      fsdp->set_sync(last);
      model.both = !last;
      backward(sum(model(ones({1, 2}))));
    }
    for (nn::LinearPtr head : {model.used, model.spare})
      for (const Tensor& p : head->parameters())
        TESSERA_CHECK(amax(abs(full_tensor(p.grad()) - 2.0)).item<double>() == 0,
                      "a gradient is not 2 everywhere");
  });
}

// A regression: weight [1, n] and bias [1] lie on the first rank alone.
TEST(Fsdp, ModelsOfOneOutputTrainAsSerial) {
  auto train_one = [](bool shard, DType param) {
    manual_seed(4);
    auto model = nn::sequential(nn::linear(3, 4), nn::gelu(), nn::layer_norm(4), nn::linear(4, 1));
    if (shard) fully_shard(*model, {.precision = {.param = param}});
    auto adam = optim::AdamW(model->parameters(), {.lr = 0.1});
    const Tensor x = sample_values({6, 3}, -1, 1, 5);
    std::vector<double> seen;
    for (int step = 0; step < 3; ++step) {
      Tensor loss = mean(square(cast((*model)(cast(x, kF32)), kF32) - 1.0));
      loss.backward();
      seen.push_back(loss.item<double>());
      const optim::Clip clip = optim::clip_grad_norm(model->parameters(), 0.5);
      seen.push_back(clip.norm.item<double>());
      adam.step(clip.scale), adam.zero_grad();
    }
    return seen;
  };
  const std::vector<double> serial = train_one(false, kF32);
  for (int ranks : {2, 3})
    run_ranks(ranks, [&](ProcessGroup&) {
      for (DType param : {kF32, kBF16}) {
        std::vector<double> got = train_one(true, param);
        for (size_t i = 0; i < serial.size(); ++i)
          TESSERA_ASSERT(std::abs(got[i] - serial[i]) <= (param == kF32 ? 1e-5 : 0.1) * serial[i],
                         "{} at {}: {}, not {}", name_of(param), i, got[i], serial[i]);
      }
    });
}

// Equal bits at every world size, for the same leaves.
TEST(Fsdp, TreeAccumulationGivesEqualBits) {
  Trained want;
  run_ranks(1, [&](ProcessGroup& group) {
    want = train(
        &group, [](nn::Module& m) { return fully_shard(m, {.tree_accumulation = true}); }, 4, kF32);
  });
  for (int ranks : {2, 4})
    run_ranks(ranks, [&](ProcessGroup& group) {
      Trained t = train(
          &group, [](nn::Module& m) { return fully_shard(m, {.tree_accumulation = true}); },
          4 / ranks, kF32);
      check_close(t, want, 0);
    });
}

// After each of seven micro-batches the tree holds the sum of all so far, with the bits of the
// trees on its levels, joined from the smallest up.
TEST(Fsdp, TreeAccumulationOfAnyNumberOfMicroBatches) {
  run_ranks(2, [&](ProcessGroup& group) {
    Scoped<DType> type(context().default_dtype, kF64);
    auto gradients = [&](int64_t first, int64_t count, bool tree) {
      manual_seed(3);
      auto model = models::gpt(
          {.vocab = test::kVocab, .context = test::kTokens, .layers = 1, .heads = 1, .dim = 4});
      auto fsdp = fully_shard(*model, {.tree_accumulation = tree});
      for (int64_t k = first; k < first + count; ++k)
        backward(model->loss(ids(k, group.rank() * 2, 2), ids(100 + k, group.rank() * 2, 2)));
      std::vector<Tensor> out;
      for (const Tensor& p : model->parameters()) out.push_back(to_local(p.grad()));
      return out;
    };
    std::vector<std::vector<Tensor>> one;
    for (int64_t k = 0; k < 7; ++k) one.push_back(gradients(k, 1, false));
    for (int64_t count = 1; count <= 7; ++count) {
      std::vector<Tensor> got = gradients(0, count, true);
      for (size_t p = 0; p < got.size(); ++p) {
        auto at = [&](int64_t k) { return one[size_t(k)][p]; };
        Tensor pair = at(0) + at(1), four = pair + (at(2) + at(3));
        const Tensor want[] = {at(0),
                               pair,
                               pair + at(2),
                               four,
                               four + at(4),
                               four + (at(4) + at(5)),
                               four + ((at(4) + at(5)) + at(6))};
        TESSERA_CHECK(equal(got[p], want[count - 1]), "parameter {} after {} micro-batches differs",
                      p, count);
      }
    }
  });
}

TEST(Fsdp, MixedPrecisionKeepsMasterWeights) {
  run_ranks(2, [&](ProcessGroup& group) {
    manual_seed(3);
    auto model = models::gpt(small());
    fully_shard(*model, {.precision = {.param = kBF16, .reduce = kF32, .output = kF32}});
    Tensor x = ids(0, group.rank() * 4, 4);
    Tensor logits = (*model)(x);
    TESSERA_CHECK(logits.dtype() == kF32, "output {}", describe(logits));
    backward(sum(square(logits)));
    for (const NamedTensor& p : model->named_parameters())
      TESSERA_CHECK(p.tensor.dtype() == kF32 && p.tensor.grad().dtype() == kF32, "{} is {}, {}",
                    p.name, describe(p.tensor), describe(p.tensor.grad()));
  });
}

// No rank ever holds the whole model, and values are those of a model drawn at once.
TEST(Fsdp, MetaModelIsDrawnShardByShard) {
  auto whole = models::gpt(small());
  whole->init(7);
  run_ranks(4, [&](ProcessGroup&) {
    nn::OnDevice meta(kMeta);
    auto model = models::gpt(small());
    fully_shard(*model);
    model->init(7);
    auto want = whole->named_parameters();
    size_t i = 0;
    for (const NamedTensor& p : model->named_parameters()) {
      TESSERA_CHECK(p.tensor.is_sharded(), "{} is whole", p.name);
      Tensor full = full_tensor(p.tensor.detach());
      TESSERA_CHECK(amax(abs(full - want[i++].tensor.detach())).item<double>() == 0, "{} differs",
                    p.name);
    }
  });
}

TEST(Fsdp, WholeWeightsAreNotKept) {
  run_ranks(2, [&](ProcessGroup& group) {
    manual_seed(3);
    auto model = models::gpt(small());
    auto fsdp = fully_shard(*model);
    for (int step = 0; step < 3; ++step) {
      Tensor loss = model->loss(ids(0, group.rank() * 4, 4), ids(100, group.rank() * 4, 4));
      FsdpMemory between = fsdp->memory();
      backward(loss);
      FsdpMemory after = fsdp->memory();
      TESSERA_CHECK(after.gathered == 0 && after.gradients == 0,
                    "{} bytes of weights, {} of gradients", after.gathered, after.gradients);
      int64_t root = between.gathered;  // the model's own group stays
      TESSERA_CHECK(after.gathered_peak <= root + 2 * after.largest_group, "{} bytes were gathered",
                    after.gathered_peak);
      TESSERA_CHECK(after.gradients_peak <= root + after.largest_group,
                    "{} bytes of whole gradients", after.gradients_peak);
      TESSERA_CHECK(after.gradients_peak >= after.largest_group, "{} bytes of whole gradients",
                    after.gradients_peak);
    }
  });
}

// A forward that fails leaves the model as it was, also when it was an evaluation.
TEST(Fsdp, AFailedForwardLeavesShards) {
  run_ranks(2, [&](ProcessGroup& group) {
    manual_seed(3);
    auto model = models::gpt(small());
    fully_shard(*model);
    Tensor good = ids(0, group.rank() * 4, 4), bad = good + 1000;
    for (bool inference : {false, true}) {
      std::string e = error_of([&] {
        std::optional<InferenceMode> off;
        if (inference) off.emplace();
        (*model)(bad);
      });
      TESSERA_ASSERT(!e.empty(), "ids out of range passed");
      for (const NamedTensor& p : model->named_parameters())
        TESSERA_ASSERT(p.tensor.is_sharded(), "{} is whole", p.name);
      backward(model->loss(good, good));
      for (const Tensor& p : model->parameters()) p.set_grad({});
    }
  });
}

TEST(Fsdp, WeightsWrittenBeforeBackwardAreNoticed) {
  std::string e;
  try {
    run_ranks(2, [&](ProcessGroup& group) {
      manual_seed(3);
      auto model = models::gpt(small());
      fully_shard(*model);
      Tensor x = ids(0, group.rank() * 4, 4), loss = model->loss(x, x);
      {
        NoGrad off;
        for (const Tensor& p : model->parameters()) assign_(p, p * 2.0);
      }
      backward(loss);
    });
  } catch (const Error& error) {
    e = error.what();
  }
  EXPECT_NE(e.find("was overwritten after it was saved for backward"), e.npos) << e;
}

TEST(Fsdp, FreezingAfterwardsIsRefused) {
  run_ranks(2, [&](ProcessGroup&) {
    auto model = models::gpt(small());
    fully_shard(*model);
    model->named_parameters()[0].tensor.requires_grad_(false);
    std::string e = error_of([&] { (*model)(ids(0, 0, 4)); });
    TESSERA_ASSERT(e.find("was frozen after fully_shard") != e.npos, "{}", e);
  });
}

TEST(Fsdp, ErrorsSayWhatToDo) {
  run_ranks(2, [&](ProcessGroup&) {
    auto model = models::gpt(small());
    std::string e = error_of([&] { fully_shard(*model, {.groups = {"blocks.*"}}); });
    TESSERA_CHECK(e.find("no module is called \"blocks.*\"") != e.npos, "{}", e);
    fully_shard(*model);
    e = error_of([&] { fully_shard(*model); });
    TESSERA_CHECK(e.find("goes to another wrapper already") != e.npos, "{}", e);
  });
}

}  // namespace
}  // namespace tessera::parallel
