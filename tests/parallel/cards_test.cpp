// Data parallel training on cards: communication runs beside the computation that does not need
// it, and no host thread waits within a step. The order is that of streams and events, as the
// virtual GPU records it, so it does not depend on luck.
#include <gtest/gtest.h>

#include <mutex>

#include "collectives/loopback/run_ranks.h"
#include "core/base/deterministic.h"
#include "core/core.h"
#include "core/dispatch/copy.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "tests/cuda/counters.h"
#include "tests/support/order_on_card.h"
#include "tests/support/ranks_on_cards.h"

namespace tessera {
namespace {

using test::OrderOnCard;

constexpr int kLayers = 5;
constexpr int64_t kWidth = 16;

class ParallelOnCards : public test::RanksWithCards {};

nn::SequentialPtr layers_on(Device device) {
  auto model = nn::sequential();
  for (int i = 0; i < kLayers; ++i)
    model->push_back(nn::linear({.in = kWidth, .out = kWidth, .bias = false}));
  model->init(1);
  model->to(device);
  return model;
}

using Prepare = std::function<std::shared_ptr<void>(nn::Module&)>;
const Prepare kDdp = [](nn::Module& m) -> std::shared_ptr<void> {
  return parallel::make_reducer(m, {.bucket_bytes = kWidth * kWidth * 4});
};
const Prepare kFsdp = [](nn::Module& m) -> std::shared_ptr<void> {
  return parallel::fully_shard(m, {.groups = {"*"}});
};

/// tanh(x * w) for each element.
class Elements final : public nn::Module {
 public:
  Elements() { register_parameter("w", weight, nn::empty_parameter({kWidth, kWidth})); }
  Tensor forward(Tensor x) override { return tanh(x * weight); }
  Tensor weight;
};

/// The bits of the weights of `Elements` layers after three steps of two ranks.
std::vector<float> trained(const std::function<Device(int rank)>& device, const Prepare& prepare) {
  std::vector<float> bits;
  run_ranks(2, [&](ProcessGroup& g) {
    nn::SequentialPtr model;
    {
      const DeviceScope scope(kCPU);
      model = nn::sequential(std::make_shared<Elements>(), std::make_shared<Elements>());
    }
    const DeviceScope scope(device(g.rank()));
    const DeterministicScope deterministic(true);
    for (const NamedTensor& p : model->named_parameters()) {
      const NoGrad off;
      assign_(p.tensor, randn(p.tensor.shape(), {kF32, kCPU}, from_values<int64_t>({7, 1}, {2})));
    }
    model->to(default_device());
    const auto keep = prepare(*model);
    optim::SGD opt(model->parameters(), {.lr = 0.1, .momentum = 0.9});
    const Tensor x =
        transferred(randn({kWidth, kWidth}, {kF32, kCPU}, from_values<int64_t>({g.rank(), 2}, {2})),
                    default_device());
    for (int i = 0; i < 3; ++i) {
      opt.zero_grad();
      sum((*model)(x)).backward();  // each element's gradient is its own
      opt.step();
    }
    for (const NamedTensor& p : model->named_parameters()) {
      const Tensor mine = p.tensor.detach();
      const Tensor host = transferred(mine.is_sharded() ? to_local(mine) : mine, kCPU);
      if (g.rank() == 0)
        bits.insert(bits.end(), host.data<float>(), host.data<float>() + host.numel());
    }
  });
  return bits;
}

class OverlapOnCards : public ParallelOnCards {
 protected:
  void SetUp() override {
    ParallelOnCards::SetUp();
    if (!IsSkipped() && !test::order_of_driver()) GTEST_SKIP() << "a real card records no order";
  }
  /// What two cards were given for one step of training, after three others.
  std::vector<OrderOnCard> step_of(const Prepare& prepare) {
    std::string recorded;
    run_ranks(2, [&](ProcessGroup& g) {
      const DeviceScope scope(card(g.rank()));
      auto model = layers_on(default_device());
      const auto keep = prepare(*model);
      optim::SGD opt(model->parameters(), {.lr = 0.1});
      const Tensor x = full({8, kWidth}, 0.5, {kF32, default_device()});
      auto step = [&] {
        opt.zero_grad();
        mean(square((*model)(x))).backward();
        opt.step();
      };
      for (int i = 0; i < 3; ++i) step();
      mean(x).item<float>();  // what came before has ended
      g.barrier();
      if (g.rank() == 0) test::begin_order();
      g.barrier();
      step();
      g.barrier();
      if (g.rank() == 0) recorded = test::end_order();
      g.barrier();
    });
    return {OrderOnCard(recorded, 0), OrderOnCard(recorded, 1)};
  }
};

/// Expects that the kernels that were enqueued between calls k and k + 1 may run beside call k.
void expect_beside(const OrderOnCard& o, const std::vector<size_t>& calls, size_t k) {
  const int lane = o.busiest_lane();
  EXPECT_NE(o.ops()[calls[k]].lane, lane) << "communication has a stream of its own";
  int kernels = 0;
  for (size_t i = calls[k] + 1; i < calls[k + 1]; ++i) {
    if (o.ops()[i].lane != lane) continue;
    ++kernels;
    EXPECT_FALSE(o.before(calls[k], i)) << o.ops()[i].name << " waits for call " << k;
  }
  EXPECT_GT(kernels, 0) << "between calls " << k << " and " << k + 1;
}

// Products and sums over rows have an order of their own on a card; all else has one text.
TEST_F(ParallelOnCards, DeterministicStepsHaveTheBitsOfTheCpuWhereElementsAreApart) {
  for (const Prepare& prepare : {kDdp, kFsdp}) {
    const std::vector<float> on_cpu = trained([](int) { return kCPU; }, prepare);
    EXPECT_FALSE(on_cpu.empty());
    EXPECT_EQ(trained([&](int rank) { return card(rank); }, prepare), on_cpu);
  }
}

TEST_F(OverlapOnCards, DdpReducesABucketBesideTheBackwardOfTheNext) {
  for (const OrderOnCard& o : step_of(kDdp)) {
    const std::vector<size_t> reductions = o.named("ncclAllReduce");
    ASSERT_EQ(reductions.size(), size_t(kLayers));
    for (size_t k = 0; k + 1 < reductions.size(); ++k) {
      expect_beside(o, reductions, k);
      EXPECT_TRUE(o.before(reductions[k] - 1, reductions[k])) << "it needs its gradients";
    }
    EXPECT_EQ(o.waits_between_ops(), std::vector<std::string>());
  }
}

TEST_F(OverlapOnCards, FsdpGathersALayerBesideTheOneBefore) {
  for (const OrderOnCard& o : step_of(kFsdp)) {
    const std::vector<size_t> gathers = o.named("ncclAllGather"),
                              reductions = o.named("ncclReduceScatter");
    ASSERT_EQ(gathers.size(), size_t(2 * kLayers));
    ASSERT_EQ(reductions.size(), size_t(kLayers));
    // Each is enqueued before the layer that is computed before its own, in forward as in backward;
    // the first of either has none before it, and the last of forward is followed by its layer.
    for (size_t k = 1; k + 1 < gathers.size(); ++k)
      if (k != kLayers - 1 && k != kLayers) expect_beside(o, gathers, k);
    for (size_t k = 0; k + 1 < reductions.size(); ++k) expect_beside(o, reductions, k);
    EXPECT_EQ(o.waits_between_ops(), std::vector<std::string>());
  }
}

// ---- memory of NCCL's own ----

int64_t gathers(const char* where) {
  return cuda::runs_so_far((std::string("ncclAllGather ") + where).c_str());
}
int64_t reductions(const char* where) {
  return cuda::runs_so_far((std::string("ncclReduceScatter ") + where).c_str());
}

// Blocks of two parameters, and one layer of the model's own group.
TEST_F(OverlapOnCards, FsdpGathersAndReducesInWindows) {
  for (const bool low : {false, true})
    run_ranks(2, [&](ProcessGroup& g) {
      const DeviceScope scope(card(g.rank()));
      auto model = nn::sequential();
      for (int i = 0; i < kLayers; ++i) model->push_back(nn::linear({.in = kWidth, .out = kWidth}));
      model->init(1);
      parallel::FsdpOptions options{.groups = {"1", "2", "3", "4"}};
      if (low) options.precision = {.param = kBF16, .reduce = kF32};
      const auto keep = parallel::fully_shard(*model, options);
      optim::SGD opt(model->parameters(), {.lr = 0.1});
      const Tensor x = full({8, kWidth}, 0.5, {kF32, default_device()});
      auto step = [&] {
        opt.zero_grad();
        mean(square((*model)(x))).backward();
        opt.step();
      };
      const auto end = [&] {
        mean(x).item<float>();
        g.barrier();
      };
      for (int i = 0; i < 2; ++i) step();
      end();
      const int64_t gathered = gathers("in windows"), reduced = reductions("in windows");
      const int64_t calls = memory_stats(default_device()).system_calls;
      const int64_t held = memory_stats(default_device()).live_bytes;
      end();
      for (int i = 0; i < 3; ++i) step();
      end();
      // A block's weights are gathered again for backward.
      EXPECT_EQ(gathers("in windows") - gathered, 3 * 2 * 2 * (2 * 4 + 1));
      EXPECT_EQ(reductions("in windows") - reduced, 3 * 2 * 2 * (4 + 1));
      EXPECT_EQ(gathers("outside of windows") + reductions("outside of windows"), 0);
      EXPECT_EQ(memory_stats(default_device()).system_calls, calls);
      EXPECT_EQ(memory_stats(default_device()).live_bytes, held);
      end();
      if (g.rank() == 0) test::begin_order();
      g.barrier();
      step();
      end();
      if (g.rank() == 0) {  // the weight and the bias of a block move together
        const OrderOnCard o(test::end_order(), 0);
        EXPECT_EQ(o.named("ncclGroup").size(), size_t(2 * 4 + 1 + 4 + 1));
        EXPECT_EQ(o.named("ncclAllGather").size() + o.named("ncclReduceScatter").size(), 0u);
      }
      g.barrier();
    });
}

/// A layer on the host, and one on a card.
class OnHostAndCard final : public nn::Module {
 public:
  explicit OnHostAndCard(Device card) : card(card) {
    register_module("host", host), register_module("there", there);
    init(1);
    there->to(card);
  }
  Tensor forward(Tensor x) override { return (*there)((*host)(x).to(card)); }
  const Device card;
  nn::LinearPtr host = nn::linear(kWidth, kWidth), there = nn::linear(kWidth, kWidth);
};

TEST_F(ParallelOnCards, FsdpOfParametersOnSeveralDevices) {
  for (const bool whole : {false, true})
    run_ranks(2, [&](ProcessGroup& g) {
      OnHostAndCard plain(card(g.rank())), sharded(card(g.rank()));
      parallel::FsdpOptions options;
      if (!whole) options.groups = {"host", "there"};
      const auto keep = parallel::fully_shard(sharded, options);
      const auto update = [](nn::Module& m) {
        const NoGrad off;
        for (const Tensor& p : m.parameters()) {
          assign_(p, p - p.grad() * 0.1);
          p.set_grad(Tensor());
        }
      };
      const Tensor x = full({8, kWidth}, 0.5, {kF32, kCPU});
      for (int k = 0; k < 3; ++k) {
        const Tensor want = mean(square(plain(x))), got = mean(square(sharded(x)));
        EXPECT_NEAR(got.item<float>(), want.item<float>(), 1e-6);
        want.backward(), got.backward();
        update(plain), update(sharded);
      }
    });
}

TEST_F(OverlapOnCards, DdpSendsTheStateOfAModelInOneLaunch) {
  run_ranks(2, [&](ProcessGroup& g) {
    const DeviceScope scope(card(g.rank()));
    auto model = layers_on(default_device());
    g.barrier();
    if (g.rank() == 0) test::begin_order();
    g.barrier();
    const auto keep = kDdp(*model);
    mean(model->parameters()[0]).item<float>();
    g.barrier();
    if (g.rank() == 0) {
      const OrderOnCard o(test::end_order(), 0);
      EXPECT_EQ(o.named("ncclGroup").size(), 1u);
      EXPECT_EQ(o.named("ncclBroadcast").size(), 0u);
    }
    g.barrier();
  });
}

// What the program keeps of a gathered weight has its values after another block has the room.
TEST_F(ParallelOnCards, AWholeWeightThatIsKeptHasItsValues) {
  run_ranks(2, [&](ProcessGroup& g) {
    const DeviceScope scope(card(g.rank()));
    auto model = layers_on(default_device());
    std::vector<Tensor> kept;
    auto& layer = dynamic_cast<nn::Linear&>(model->submodule("2"));
    const auto values = [](const Tensor& t) {
      const Tensor host = transferred(t.detach(), kCPU);
      return std::vector<float>(host.data<float>(), host.data<float>() + host.numel());
    };
    std::vector<float> want;
    layer.add_post_hook([&](nn::Module&, Inputs, Tensor&) {
      kept.push_back(layer.weight.detach());
      if (want.empty()) want = values(kept[0]);
    });
    const auto keep = kFsdp(*model);
    const Tensor x = full({8, kWidth}, 0.5, {kF32, default_device()});
    for (int i = 0; i < 2; ++i) mean(square((*model)(x))).backward();
    ASSERT_EQ(kept.size(), 2u);
    for (const Tensor& t : kept) EXPECT_EQ(values(t), want);
  });
}

}  // namespace
}  // namespace tessera
