// Compares batch-norm over ranks with batch-norm of the whole batch on one.
#include "parallel/sync_batch_norm.h"

#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "dtensor/dtensor.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "tests/parallel/small_net.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

struct Problem {
  Shape shape{7, 3, 4, 2};
  DType dtype = kF64;
  bool channels_last = false, then = false, affine = true;
  std::optional<double> momentum = 0.1;
};

// Two steps of `norm` on rows [begin, begin + count) of the batch; rows of y and dx, this rank's
// gradients of parameters, running statistics.
struct Outcome {
  Named rows, sums, running;
};
Outcome two_steps(nn::BatchNormNd& norm, const Problem& p, int64_t begin, int64_t count) {
  Outcome out;
  norm.to(p.dtype == kF64 ? kF64 : kF32);
  for (int64_t step = 0; step < 2; ++step) {
    auto part = [&](int64_t key, DType t) {
      Tensor rows = narrow(draw(p.shape, 10 * step + key, t), 0, begin, count).clone();
      return p.channels_last ? contiguous(rows, MemoryFormat::kChannelsLast) : rows;
    };
    const Tensor x = (part(1, p.dtype) * 2.0 + 3.0).detach().requires_grad_(),
                 z = part(2, p.dtype).detach().requires_grad_();
    const Tensor y = norm(x, p.then ? NormThen{.residual = z, .relu = true} : NormThen{});
    EXPECT_EQ(y.dtype(), p.dtype);
    norm.zero_grad();
    backward(sum(y.to(kF64) * part(3, kF64)));
    out.rows.push_back({"y", y.detach()}), out.rows.push_back({"dx", x.grad()});
    if (p.then) out.rows.push_back({"dz", z.grad()});
    for (const NamedTensor& t : norm.named_parameters())
      out.sums.push_back({t.name, t.tensor.grad().clone()});
  }
  for (const NamedTensor& b : norm.named_buffers()) out.running.push_back({b.name, b.tensor});
  return out;
}

Named cut_rows(const Named& all, int64_t begin, int64_t count) {
  Named out;
  for (const auto& [name, t] : all) out.push_back({name, narrow(t, 0, begin, count)});
  return out;
}

// `each`: rows of each rank.
void check(const Problem& p, const std::vector<int64_t>& each, double tolerance,
           const std::string& what) {
  const nn::BatchNormOptions options{
      .channels = p.shape[1], .momentum = p.momentum, .affine = p.affine};
  auto plain = nn::sync_batch_norm(options);  // a group of one
  EXPECT_FALSE(plain->shares_moments());
  const Outcome whole = two_steps(*plain, p, 0, p.shape[0]);
  std::vector<Outcome> ranks(each.size());
  run_ranks(int(each.size()), [&](ProcessGroup& group) {
    const size_t r = size_t(group.rank());
    int64_t begin = 0;
    for (size_t k = 0; k < r; ++k) begin += each[k];
    auto norm = nn::sync_batch_norm(options, Ref<ProcessGroup>(&group));
    ranks[r] = two_steps(*norm, p, begin, each[r]);
    expect_near(ranks[r].rows, cut_rows(whole.rows, begin, each[r]), tolerance, what);
    expect_near(ranks[r].running, whole.running, tolerance, what);
  });
  for (size_t i = 0; i < whole.sums.size(); ++i) {
    Tensor sum = ranks[0].sums[i].second;
    for (size_t r = 1; r < ranks.size(); ++r) sum = sum + ranks[r].sums[i].second;
    EXPECT_LE(apart(sum, whole.sums[i].second), 20 * tolerance) << what << whole.sums[i].first;
  }
  for (const Outcome& o : ranks) expect_near(o.running, ranks[0].running, 0, what + ", equal bits");
}

TEST(SyncBatchNorm, EqualsTheWholeBatchOnOneRank) {
  const std::vector<std::vector<int64_t>> cuts{{4, 3}, {1, 6}, {2, 4, 1}};
  for (const std::vector<int64_t>& each : cuts)
    for (bool then : {false, true})
      for (bool channels_last : {false, true}) {
        const std::string what = fmt::format("ranks {}, then {}", each.size(), then);
        const Problem p{.channels_last = channels_last, .then = then};
        check(p, each, 1e-13, what);
        Problem f32 = p;
        f32.dtype = kF32;
        check(f32, each, 2e-6, what + " f32");
      }
}

TEST(SyncBatchNorm, OfAnyNumberOfDimsWithoutWeightsAndWithAverages) {
  check({.shape = {6, 3}}, {2, 4}, 1e-13, "[N, C]");
  check({.shape = {6, 3, 5}, .affine = false}, {5, 1}, 1e-13, "[N, C, L]");
  check({.shape = {3, 2, 2, 3, 2}, .momentum = {}}, {1, 1, 1}, 1e-13, "[N, C, D, H, W]");
}

TEST(SyncBatchNorm, ARankWithoutRows) {
  check({}, {7, 0}, 1e-13, "none on the last");
  check({.then = true}, {0, 3, 4}, 1e-13, "none on the first");
}

// Rounded once from f32 statistics, as plain batch-norm; gradients of y.dtype go in.
// What plain batch-norm refuses on one rank is refused on all, whichever rank has the one value.
TEST(SyncBatchNorm, OneValueOfAllRanksIsRefused) {
  run_ranks(3, [](ProcessGroup& g) {
    auto norm = nn::sync_batch_norm({.channels = 2});
    auto refusal = [&](int64_t rows) {
      try {
        (*norm)(ones({rows, 2}));
      } catch (const ShapeError& e) {
        return std::string(e.what());
      }
      return std::string();
    };
    expect_contains(refusal(g.rank() == 1), "1 values a channel on all ranks");
    expect_contains(refusal(0), "0 values a channel on all ranks");
    EXPECT_EQ(refusal(g.rank() < 2), "");
    EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 1);
  });
}

// A batch that is cut has the statistics of the whole, which an op does not gather by itself.
TEST(SyncBatchNorm, IsNamedWhereABatchIsCut) {
  run_ranks(2, [](ProcessGroup&) {
    DeviceMesh mesh = init_device_mesh({{"dp", 2}});
    const Tensor x0 = draw({6, 4, 3}, 1), want = batch_norm(x0, {}, {}, {.training = true});
    const Tensor x = distribute(x0, mesh, {Shard(0)});
    auto refusal = [&](auto f) {
      try {
        f();
      } catch (const ShardingError& e) {
        return std::string(e.what());
      }
      return std::string();
    };
    expect_contains(refusal([&] { batch_norm(x, {}, {}, {.training = true}); }),
                    "nn::SyncBatchNorm");
    auto sync = nn::sync_batch_norm({.channels = 4, .affine = false});
    expect_contains(refusal([&] { (*sync)(x); }), "to_local(x)");
    // Channels of different ranks are no parts of one batch.
    expect_contains(refusal([&] { (*sync)(distribute(x0, mesh, {Shard(1)})); }),
                    "over other ranks than those that share statistics");
    const Tensor y = from_local((*sync)(to_local(x)), mesh, {Shard(0)}, x0.shape());
    EXPECT_LE(apart(full_tensor(y), want), 1e-6);
    const Tensor channels =
        batch_norm(distribute(x0, mesh, {Shard(1)}), {}, {}, {.training = true});
    EXPECT_LE(apart(full_tensor(channels), want), 1e-12);
    AllowCommunication on;
    EXPECT_LE(apart(full_tensor(batch_norm(x, {}, {}, {.training = true})), want), 1e-12);
  });
}

// E[x^2] - E[x]^2 has no digits left where the mean is 1e8 deviations.
TEST(SyncBatchNorm, ALargeMeanCostsNoDigits) {
  run_ranks(3, [](ProcessGroup& group) {
    const Tensor x0 = draw({30, 2, 5}, 1);
    for (double shift : {1e3, 1e6, 1e8}) {
      const Tensor x = x0 + shift, want = batch_norm(x, {}, {}, {.training = true});
      auto norm = nn::sync_batch_norm({.channels = 2, .affine = false});
      norm->to(kF64);
      const Tensor mine = narrow(x, 0, group.rank() * 10, 10).clone();
      EXPECT_LE(apart((*norm)(mine), narrow(want, 0, group.rank() * 10, 10)), 4e-16 * shift)
          << shift;
    }
  });
}

TEST(SyncBatchNorm, SixteenBits) {
  Autocast scope(kBF16);
  for (bool then : {false, true})
    check({.shape = {8, 3, 4, 2}, .dtype = kBF16, .then = then}, {5, 3}, 0.04, "bf16");
}

TEST(SyncBatchNorm, EvaluationIsPlain) {
  const Tensor x = draw({4, 3, 2, 2}, 5, kF32);
  run_ranks(2, [&](ProcessGroup& group) {
    auto norm = nn::sync_batch_norm({.channels = 3}, Ref<ProcessGroup>(&group));
    auto plain = nn::batch_norm2d({.channels = 3});
    (*norm)(narrow(x, 0, 2 * group.rank(), 2));
    for (const NamedTensor& b : plain->named_buffers()) plain->slot(b.name) = norm->slot(b.name);
    norm->eval(), plain->eval();
    if (group.rank() == 0) {  // alone
      EXPECT_EQ(apart((*norm)(x), (*plain)(x)), 0);
    }
  });
}

// ---- in a model

TEST(SyncBatchNorm, UnderDdpAndFullySharded) {
  const Named serial = train(1, {});
  for (int ranks : {2, 3}) expect_near(train(ranks, under_ddp()), serial, 5e-6, "ddp");
  expect_near(train(2, fully_sharded()), serial, 5e-6, "fully sharded");
}

TEST(SyncBatchNorm, Converts) {
  run_ranks(2, [&](ProcessGroup&) {
    auto model = small_net();
    const std::vector<Tensor> before = model->parameters();
    nn::convert_sync_batch_norm(*model);
    EXPECT_EQ(model->submodule("1").type_name(), "SyncBatchNorm");
    EXPECT_EQ(model->submodule("0").type_name(), "Conv2d");
    for (size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(model->parameters()[i].is_same(before[i]));
    auto none = nn::linear(2, 2);
    EXPECT_THROW(nn::convert_sync_batch_norm(*none), UserError);
  });
}

}  // namespace
}  // namespace tessera
