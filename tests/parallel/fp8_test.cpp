// Layers in eight bits on two ranks against one.
#include "parallel/fp8.h"

#include <gtest/gtest.h>

#include <optional>

#include "collectives/decorators/counting.h"
#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "parallel/tensor_parallel.h"

namespace tessera::parallel {
namespace {

constexpr int64_t kRows = 16, kIn = 32, kHidden = 64;

nn::SequentialPtr make(const nn::Fp8Options& options) {
  auto model = nn::sequential(nn::linear(kIn, kHidden), nn::tanh(), nn::linear(kHidden, kIn));
  nn::convert_to_fp8(*model, options);
  model->init(7);
  return model;
}
Tensor inputs() { return cast(sample_values({kRows, kIn}, -1, 1, 1), kF32); }
Tensor loss_of(nn::Module& model, const Tensor& x) { return mean(square(model(x))); }

std::vector<Tensor> gradients(nn::Module& model) {
  std::vector<Tensor> all;
  for (const Tensor& p : model.parameters()) all.push_back(full_tensor(p.grad()));
  return all;
}
std::vector<Tensor> serial_gradients() {
  auto model = make({});
  backward(loss_of(*model, inputs()));
  return gradients(*model);
}
// Fails where a gradient is further off than `share` of its largest value.
void check(const std::vector<Tensor>& got, const std::vector<Tensor>& want, double share) {
  for (size_t i = 0; i < want.size(); ++i) {
    const double off = amax(abs(got[i] - want[i])).item<double>(),
                 size = amax(abs(want[i])).item<double>();
    TESSERA_ASSERT(off <= share * size, "gradient {} is {} off, its largest is {}", i, off, size);
  }
}

// Ranks scale their own activations, so a term of a sum differs by what two roundings to E4M3 and
// two to E5M2 may: 2 (2^-4 + 2^-3). Sums of many terms, of both signs, are off by less of their
// largest; a rank that took another's scale for its values would be off by a factor of two.
constexpr double kOtherScales = 0.375;

TEST(Fp8Ranks, DdpAndFullyShardedScaleWhatEachRankHas) {
  const std::vector<Tensor> want = serial_gradients();
  for (bool shards : {false, true})
    run_ranks(2, [&](ProcessGroup& group) {
      auto model = make({});
      if (shards)
        fully_shard(*model, {.mesh = init_device_mesh({{"dp", 2}})});
      else
        ddp(model, {.group = Ref<ProcessGroup>(&group)});
      backward(loss_of(*model, narrow(inputs(), 0, group.rank() * 8, 8)));
      check(gradients(*model), want, kOtherScales);
    });
}

// Tensors that are cut have one scale, so every element is rounded as on one rank.
TEST(Fp8Ranks, TensorParallelScalesWholeTensors) {
  const std::vector<Tensor> want = serial_gradients();
  run_ranks(2, [&](ProcessGroup&) {
    auto model = make({});
    parallelize_module(*model, init_device_mesh({{"tp", 2}}), {{"", pairwise()}});
    backward(loss_of(*model, inputs()));
    check(gradients(*model), want, 1e-5);
  });
}

TEST(Fp8Ranks, HistoriesAreTheLargestOfAllRanks) {
  const nn::Fp8Options delayed{.recipe = nn::Fp8Recipe::kDelayed, .history = 3};
  for (const char* how : {"ddp", "fsdp", "tp"})
    run_ranks(2, [&](ProcessGroup& group) {
      const bool tp = how == std::string("tp");
      auto model = make(delayed), serial = make(delayed);
      if (how == std::string("ddp")) ddp(model, {.group = Ref<ProcessGroup>(&group)});
      if (how == std::string("fsdp")) fully_shard(*model, {.mesh = init_device_mesh({{"dp", 2}})});
      if (tp) parallelize_module(*model, init_device_mesh({{"tp", 2}}), {{"", pairwise()}});
      for (int step = 0; step < 3; ++step) {
        const Tensor all = inputs() * double(1 + step);
        backward(loss_of(*model, tp ? all : narrow(all, 0, group.rank() * 8, 8)));
        backward(loss_of(*serial, all));
        const Ref<ProcessGroup> alone = group.split(group.rank());
        nn::update_fp8_scales(*model, tp ? alone : Ref<ProcessGroup>(&group));
        nn::update_fp8_scales(*serial);
        const auto mine = model->state(), one = serial->state();
        for (size_t i = 0; i < one.size(); ++i) {
          if (!nn::is_fp8_history(one[i].name)) continue;
          const Tensor got = full_tensor(mine[i].tensor), want = one[i].tensor;
          // The first layer has the x and w of one rank.
          TESSERA_ASSERT(i > 2 || equal(narrow(got, 0, 0, 2), narrow(want, 0, 0, 2)), "{}", how);
          const Tensor both = clone(got);
          group.all_reduce(both);
          TESSERA_ASSERT(equal(both, got * 2.0), "{}: ranks differ", how);
        }
      }
    });
}

// Models that fill their weights by rules of their own leave such buffers out.
TEST(Fp8Ranks, HistoriesAreEmptyWhereAModelGetsMemory) {
  std::optional<nn::OnDevice> nowhere(kMeta);
  auto model = nn::sequential(nn::linear(kIn, kHidden));
  nn::convert_to_fp8(*model, {.recipe = nn::Fp8Recipe::kDelayed});
  nowhere.reset();
  for (std::vector<Tensor> used; used.size() < 64;)  // the memory that it gets
    used.push_back(full({3, 16}, 7.0, {kF32}));
  materialize(*model);
  const auto buffers = model->named_buffers();
  EXPECT_EQ(buffers.size(), 2u);
  for (const NamedTensor& t : buffers) EXPECT_EQ(amax(t.tensor).item<float>(), 0) << t.name;
}

}  // namespace
}  // namespace tessera::parallel
