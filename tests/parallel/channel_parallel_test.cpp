// Convolutions and batch-norms cut by channels, alone and with sharded parameters, against serial
// training: losses, gradients, running statistics.
#include <gtest/gtest.h>

#include <array>

#include "collectives/decorators/counting.h"
#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/nn/nn.h"
#include "core/ops/contract.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "examples/models/resnet.h"
#include "parallel/fsdp.h"
#include "parallel/running_statistics.h"
#include "parallel/sync_batch_norm.h"
#include "parallel/tensor_parallel.h"

namespace tessera::parallel {
namespace {

constexpr int64_t kRows = 6;

models::ResNetOptions small_resnet(int64_t depth) {
  return {.depth = depth, .classes = 5, .width = 4, .small_images = true};
}

Tensor images(int64_t step, int64_t first, int64_t rows) {
  return narrow(sample_values({kRows, 3, 8, 8}, -1, 1, uint64_t(step)), 0, first, rows).clone();
}
Tensor classes(int64_t step, int64_t first, int64_t rows) {
  return narrow(sample_integers({kRows}, 0, 5, uint64_t(50 + step)), 0, first, rows).clone();
}

using Prepare = std::function<std::shared_ptr<void>(nn::Module&)>;
struct Share {  // of a batch
  int ranks = 1, rank = 0;
  int micro_batches = 1;
};

// Parameters and buffers after two steps, and the first step's loss and gradients.
std::vector<NamedTensor> train(const models::ResNetOptions& o, const Prepare& prepare,
                               const Share& share = {}, Ref<ProcessGroup> data = {}) {
  Scoped<DType> type(context().default_dtype, kF64);
  auto model = models::resnet(o);
  model->init(7);
  auto keep = prepare ? prepare(*model) : nullptr;
  std::unique_ptr<RunningStatistics> statistics;
  if (data) statistics = std::make_unique<RunningStatistics>(*model, data, false);
  optim::SGD opt(model->named_parameters(), {.lr = 0.01, .momentum = 0.9});
  std::vector<NamedTensor> out;
  const int64_t leaves = share.ranks * share.micro_batches, rows = kRows / leaves;
  for (int64_t step = 0; step < 2; ++step) {
    for (int k = 0; k < share.micro_batches; ++k) {
      const int64_t first = (k * share.ranks + share.rank) * rows;
      if (statistics) statistics->before(size_t(k), size_t(share.micro_batches));
      Tensor y = (*model)(images(step, first, rows));
      if (statistics) statistics->after(size_t(k), size_t(share.micro_batches));
      LossParallel same_targets;
      Tensor loss = cross_entropy(y, classes(step, first, rows));
      backward(loss * (1.0 / share.micro_batches));
      if (step == 0 && leaves == 1) out.push_back({"loss", full_tensor(loss.detach())});
    }
    if (step == 0)
      for (const NamedTensor& p : model->named_parameters())
        out.push_back({"gradient of " + p.name, full_tensor(p.tensor.grad()).clone()});
    opt.step();
    opt.zero_grad();
  }
  for (const NamedTensor& t : model->state())
    out.push_back({t.name, full_tensor(t.tensor.detach()).clone()});
  return out;
}

void check_near(const std::vector<NamedTensor>& got, const std::vector<NamedTensor>& want) {
  TESSERA_ASSERT(got.size() == want.size(), "{} values where {} are due", got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    TESSERA_ASSERT(got[i].name == want[i].name, "{} where {} is due", got[i].name, want[i].name);
    const Tensor a = cast(got[i].tensor, kF64), b = cast(want[i].tensor, kF64);
    const double far = amax(abs(a - b)).item<double>(), size = amax(abs(b)).item<double>();
    TESSERA_ASSERT(far <= 1e-9 * (1 + size), "{} differs by {} of {}", got[i].name, far, size);
  }
}

// Four channels over three ranks leave the last one none in the first layer.
TEST(ChannelParallel, ResNetsTrainAsSerial) {
  for (int64_t depth : {18, 50}) {
    const models::ResNetOptions o = small_resnet(depth);
    const std::vector<NamedTensor> serial = train(o, {});
    for (int ranks : {1, 2, 3, 4})
      run_ranks(ranks, [&](ProcessGroup& group) {
        DeviceMesh mesh = init_device_mesh({{"tp", group.size()}});
        int64_t held = 0;
        auto cut = [&](nn::Module& m) -> std::shared_ptr<void> {
          parallelize_module(m, mesh, models::tensor_parallel_plan(o));
          for (const Tensor& p : m.parameters()) held += shard_data(p)->local.numel();
          return nullptr;
        };
        check_near(train(o, cut), serial);
        const double share = double(held) / double(models::resnet(o)->num_parameters());
        TESSERA_ASSERT(ranks == 3 || share < 1.06 / ranks + 0.01,
                       "rank {} of {} holds {} of the parameters", group.rank(), ranks, share);
      });
  }
}

TEST(ChannelParallel, WithShardedParameters) {
  const models::ResNetOptions o = small_resnet(18);
  std::vector<NamedTensor> serial;
  run_ranks(1, [&](ProcessGroup& group) {
    serial = train(o, {}, {.micro_batches = 2}, Ref<ProcessGroup>(&group));
  });
  run_ranks(4, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"dp", 2}, {"tp", 2}});
    auto cut = [&](nn::Module& m) -> std::shared_ptr<void> {
      parallelize_module(m, mesh["tp"], models::tensor_parallel_plan(o));
      return fully_shard(m, {.mesh = mesh["dp"]});
    };
    check_near(train(o, cut, {.ranks = 2, .rank = mesh.coordinate("dp")}), serial);
  });
}

// There is one all-reduce for each block and direction. Where shapes change, the shortcut is made
// whole forward and its gradient summed backward; the classifier adds one each. A bottleneck leaves
// the channels between its last convolutions cut.
TEST(ChannelParallel, CollectivesOfAResNet) {
  struct Case {
    int64_t depth, blocks, short_ways;
  };
  for (const Case& c : {Case{18, 8, 3}, Case{50, 16, 4}})
    run_ranks(2, [&](ProcessGroup& group) {
      auto counting = make_ref<CountingGroup>(Ref<ProcessGroup>(&group));
      const models::ResNetOptions o = small_resnet(c.depth);
      auto model = models::resnet(o);
      parallelize_module(*model, init_device_mesh({{"tp", 2}}, counting),
                         models::tensor_parallel_plan(o));
      auto expect = [&, last = std::array<int64_t, 3>{}](const char* when, int64_t reduced,
                                                         int64_t gathered,
                                                         int64_t scattered) mutable {
        const CollectiveCounts& n = counting->counts();
        std::array<int64_t, 3> now = {n.calls(CollKind::kAllReduce), n.calls(CollKind::kAllGather),
                                      n.calls(CollKind::kReduceScatter)};
        TESSERA_ASSERT(
            now[0] - last[0] == reduced && now[1] - last[1] == gathered &&
                now[2] - last[2] == scattered && n.total_calls() == now[0] + now[1] + now[2],
            "{} of {}: {} all-reduces, {} all-gathers, {} reduce-scatters of {} in all", when,
            c.depth, now[0] - last[0], now[1] - last[1], now[2] - last[2], n.total_calls());
        last = now;
      };
      expect("before", 0, 0, 0);
      const int64_t cut = o.bottleneck() ? c.blocks : 0;
      Tensor y = (*model)(cast(images(0, 0, kRows), kF32));
      expect("forward", c.blocks + 1, c.short_ways, cut);
      LossParallel same_targets;
      backward(cross_entropy(y, classes(0, 0, kRows)));
      expect("backward", c.blocks + c.short_ways, cut + 1, 0);
    });
}

// With the statistics of both halves of the batch, the halves are trained like the whole batch.
TEST(ChannelParallel, WithStatisticsOfSeveralRanks) {
  const models::ResNetOptions o = small_resnet(18);
  const std::vector<NamedTensor> whole = train(o, {});
  run_ranks(4, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"dp", 2}, {"tp", 2}});
    auto cut = [&](nn::Module& m) -> std::shared_ptr<void> {
      nn::convert_sync_batch_norm(m, mesh.group("dp"));
      parallelize_module(m, mesh["tp"], models::tensor_parallel_plan(o));
      return fully_shard(m, {.mesh = mesh["dp"]});
    };
    std::vector<NamedTensor> got = train(o, cut, {.ranks = 2, .rank = mesh.coordinate("dp")});
    got.insert(got.begin(), whole[0]);  // the loss is that of a half
    check_near(got, whole);
  });
}

// A bias is added to the finished sum, or to its own channels of it.
TEST(ChannelParallel, BiasesAndOutputs) {
  Scoped<DType> type(context().default_dtype, kF64);
  const Tensor x = sample_values({2, 3, 5}, -1, 1, 1);
  auto make = [] {
    auto m = nn::sequential(
        nn::conv1d({.in = 3, .out = 4, .kernel = 3}), nn::batch_norm1d({.channels = 4}),
        nn::conv1d({.in = 4, .out = 6, .kernel = 1}), nn::batch_norm1d({.channels = 6}),
        nn::conv1d({.in = 6, .out = 3, .kernel = 3, .padding = 1}));
    m->init(3);
    return m;
  };
  auto run = [&](nn::Module& m) {
    Tensor y = m(x);
    backward(mean(square(y)));
    std::vector<NamedTensor> out{{"y", full_tensor(y.detach())}};
    for (const NamedTensor& p : m.named_parameters())
      out.push_back({p.name, full_tensor(p.tensor.grad())});
    for (const NamedTensor& b : m.named_buffers()) out.push_back({b.name, full_tensor(b.tensor)});
    return out;
  };
  auto serial = make();
  const std::vector<NamedTensor> want = run(*serial);
  for (const Placement& between : {Placement(Shard(1)), Placement(Replicate())})
    run_ranks(2, [&](ProcessGroup&) {
      Scoped<DType> type(context().default_dtype, kF64);
      DeviceMesh mesh = init_device_mesh({{"tp", 2}});
      auto model = make();
      parallelize_module(*model, mesh,
                         {{"0", colwise()},
                          {"1", channel_parallel()},
                          {"2", rowwise({.output = between})},
                          {"3", channel_parallel(between)},
                          {"4", rowwise()}});
      check_near(run(*model), want);
    });
}

TEST(ChannelParallel, ErrorsSayWhatToDo) {
  run_ranks(2, [&](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"tp", 2}});
    auto refused = [](auto f, const char* part) {
      std::string text = "no error";
      try {
        f();
      } catch (const UserError& e) {
        text = e.what();
      }
      TESSERA_ASSERT(text.find(part) != text.npos, "{}", text);
    };
    auto apply = [&](std::shared_ptr<nn::Module> m, const StylePtr& style) {
      parallelize_module(*nn::sequential(m), mesh, {{"0", style}});
    };
    auto grouped = nn::conv2d({.in = 4, .out = 4, .kernel = 1, .groups = 2});
    refused([&] { apply(grouped, colwise()); },
            "a Conv2d; it takes a Linear, a convolution of one");
    refused([&] { apply(grouped, rowwise()); },
            "a Conv2d; it takes a Linear, a convolution of one");
    refused([&] { apply(nn::linear(2, 2), channel_parallel()); },
            "a Linear; it takes a batch-norm");
    for (const StylePtr& style : {colwise(), rowwise()}) {
      auto conv = nn::sequential(nn::conv1d({.in = 2, .out = 2, .kernel = 1}));
      parallelize_module(*conv, mesh, {{"0", style}});
      ExactContraction exact;
      refused(
          [&] {
            (*conv)(sample_values({2, 2, 3}, -1, 1, 1));
          },
          "the convolution \"0\" sums over channels that ranks share");
    }
  });
}

}  // namespace
}  // namespace tessera::parallel
