// Mixed precision on several ranks: the numbers are the same under every wrapper, as far as sums
// over ranks permit, and all ranks skip the same steps.
#include <gtest/gtest.h>

#include <limits>

#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/tensor/allocator.h"
#include "core/tensor/random.h"
#include "dtensor/dtensor.h"
#include "examples/models/gpt.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "parallel/tensor_parallel.h"
#include "tests/parallel/small_gpt.h"

namespace tessera::parallel {
namespace {

using test::check_close;
using test::Trained;
using Wrap = std::function<void(models::Gpt&)>;

Trained train(DType precision, ProcessGroup* group, const Wrap& wrap) {
  test::TrainOptions o{.dtype = kF32};
  if (group) o.dp_ranks = group->size(), o.dp_rank = group->rank();
  Autocast scope(precision);  // lives longer than weights keep their values
  return test::train(wrap, o);
}

double apart(const Trained& a, const Trained& b) {
  double most = 0;
  for (size_t i = 0; i < a.params.size(); ++i)
    most = std::max(most, amax(abs(a.params[i].tensor - b.params[i].tensor)).item<double>());
  return most;
}

TEST(MixedPrecision, ShardedTrainingIsReplicatedTraining) {
  for (DType precision : {kBF16, kF16})
    run_ranks(2, [&](ProcessGroup& group) {
      std::shared_ptr<Reducer> reducer;
      Trained replicated =
          train(precision, &group, [&](nn::Module& m) { reducer = make_reducer(m, {}); });
      for (bool reshard : {true, false}) {
        Trained sharded = train(precision, &group, [&](nn::Module& m) {
          fully_shard(m, {.reshard_after_forward = reshard});
        });
        check_close(sharded, replicated, 0);  // two ranks: sums of two terms have one order
      }
    });
}

TEST(MixedPrecision, TensorParallelIsCloseToSerial) {
  Trained exact = train(kF32, nullptr, nullptr), serial = train(kBF16, nullptr, nullptr);
  const double rounding = apart(serial, exact);
  EXPECT_GT(rounding, 0) << "nothing was computed in bf16";
  run_ranks(2, [&](ProcessGroup&) {
    Autocast scope(kBF16);
    DeviceMesh mesh = init_device_mesh({{"tp", 2}});
    Trained cut = test::train(
        [&](models::Gpt& m) {
          parallelize_module(m, mesh["tp"], models::tensor_parallel_plan(m.options));
        },
        {.dtype = kF32});
    // Partial sums are rounded before they meet: as far from f32 as serial bf16, not farther.
    double distance = apart(cut, exact);
    TESSERA_CHECK(distance > 0 && distance < 2 * rounding, "{} from f32, serial bf16 is {}",
                  distance, rounding);
  });
}

// Weights may also be gathered in bf16, which halves the bytes: norms then read rounded weights.
TEST(MixedPrecision, GatheredInBf16IsCloseToAutocastAlone) {
  Trained exact = train(kF32, nullptr, nullptr), serial = train(kBF16, nullptr, nullptr);
  const double rounding = apart(serial, exact);
  run_ranks(2, [&](ProcessGroup& group) {
    Trained low = train(kBF16, &group, [&](nn::Module& m) {
      fully_shard(m, {.precision = {.param = kBF16, .reduce = kF32}});
    });
    double distance = apart(low, exact);
    TESSERA_CHECK(distance > 0 && distance < 2 * rounding, "{} from f32, serial bf16 is {}",
                  distance, rounding);
  });
}

TEST(MixedPrecision, InputsInStorageFormatsStayAsTheyAre) {
  struct Looks final : nn::Module {
    nn::LinearPtr linear = register_module("linear", nn::linear(4, 4));
    DType given = kBool;

   protected:
    Tensor forward(Tensor x) override {
      given = x.dtype();
      return (*linear)(x.to(kBF16));
    }
  };
  run_ranks(2, [&](ProcessGroup&) {
    auto model = std::make_shared<Looks>();
    fully_shard(*model, {.precision = {.param = kBF16}});
    (*model)(zeros({2, 4}, {.dtype = kF8E4M3}));
    TESSERA_CHECK(model->given == kF8E4M3, "the input is {}", name_of(model->given));
  });
}

// A gathered weight is not kept for backward, nor is its cast.
TEST(MixedPrecision, CastsOfGatheredWeightsAreMadeAgain) {
  run_ranks(2, [&](ProcessGroup& group) {
    auto held = [&](DType precision) {
      manual_seed(3);
      auto model = models::gpt({.vocab = 19, .context = 6, .layers = 6, .heads = 2, .dim = 128});
      auto fsdp = fully_shard(*model);
      Autocast scope(precision);
      Tensor x = test::ids(0, 0, 2), y = test::ids(1, 0, 2);
      group.barrier();  // bytes are those of all ranks
      const int64_t before = cpu_memory_stats().live_bytes;
      group.barrier();
      Tensor loss = model->loss(x, y);
      group.barrier();
      const int64_t after = cpu_memory_stats().live_bytes;
      group.barrier();
      return after - before;
    };
    int64_t wide = held(kF32), low = held(kBF16);
    // Six blocks of 12 x 128^2 weights would be 2.3 MB in bf16 on each of two ranks.
    TESSERA_CHECK(low < wide + 1'000'000, "forward keeps {} bytes in bf16, {} in f32", low, wide);
  });
}

TEST(GradScalerOnRanks, AllSkipTheSameStep) {
  for (bool shard : {false, true})
    run_ranks(3, [&](ProcessGroup& group) {
      manual_seed(3);
      auto model = nn::sequential(nn::linear(4, 6), nn::gelu(), nn::linear(6, 2));
      std::shared_ptr<Reducer> reducer;
      if (shard)
        fully_shard(*model);
      else
        reducer = make_reducer(*model, {});
      optim::AdamW opt(model->named_parameters(), {.lr = 0.01});
      optim::GradScaler scaler({.init_scale = 8, .growth_interval = 2});
      std::vector<double> scales;
      for (int step = 0; step < 5; ++step) {
        Tensor x = full({2, 4}, 0.5 + group.rank());
        // Values that only one rank has, in a step of its own.
        if (step == 1 && group.rank() == 2) x = x * std::numeric_limits<float>::infinity();
        Tensor before = full_tensor(model->parameters()[0].detach()).clone();
        scaler.scale(mean(square((*model)(x)))).backward();
        auto clip =
            optim::clip_grad_norm(opt.parameters(), 1.0, {.grad_scale = scaler.inverse_scale()});
        scaler.step(opt, clip);
        scaler.update();
        opt.zero_grad();
        Tensor after = full_tensor(model->parameters()[0].detach());
        bool moved = amax(abs(after - before)).item<float>() > 0;
        TESSERA_CHECK(moved == (step != 1) && scaler.skipped() == (step == 1), "step {} of rank {}",
                      step, group.rank());
        scales.push_back(scaler.current_scale());
      }
      TESSERA_CHECK((scales == std::vector<double>{8, 4, 4, 8, 8}), "scales of rank {}",
                    group.rank());
      TESSERA_CHECK(opt.step_count().item<double>() == 4, "steps of rank {}", group.rank());
    });
}

}  // namespace
}  // namespace tessera::parallel
