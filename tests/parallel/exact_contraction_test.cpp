// Exact contraction: training under tensor parallelism, alone and with fully sharded parameters,
// gives the bits of serial training; without it, it does not.
#include <gtest/gtest.h>

#include <cstring>

#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/ops/contract.h"
#include "core/ops/pointwise.h"
#include "core/ops/samples.h"
#include "examples/models/gpt.h"
#include "parallel/fsdp.h"
#include "tests/parallel/small_gpt.h"

namespace tessera::parallel {
namespace {

using test::Trained;
using test::TrainOptions;

// Loops of 16, 32, 48 and 64: widths, vocabulary, queries-keys-values, feed-forward.
models::GptOptions model(double dropout, bool tied = true) {
  return {.vocab = 32,
          .context = test::kTokens,
          .layers = 2,
          .heads = 4,
          .dim = 16,
          .dropout = dropout,
          .bias = true,
          .tied = tied};
}

// The first parameter, loss or norm with different bits; empty: none.
std::string difference(const Trained& got, const Trained& want) {
  for (size_t i = 0; i < want.params.size(); ++i) {
    const Tensor a = got.params[i].tensor, b = want.params[i].tensor;
    TESSERA_ASSERT(got.params[i].name == want.params[i].name && a.nbytes() == b.nbytes() &&
                       a.is_contiguous() && b.is_contiguous(),
                   "{} where {} is due", got.params[i].name, want.params[i].name);
    if (std::memcmp(a.raw(), b.raw(), a.nbytes()) != 0) return want.params[i].name;
  }
  if (std::memcmp(&got.norm, &want.norm, sizeof(double)) != 0) return "norm of the gradients";
  return {};
}

Trained train(bool exact, const std::function<void(models::Gpt&)>& wrap, TrainOptions o) {
  Scoped<bool> option(context().exact_contraction, exact);
  o.dtype = kF32;
  return test::train(wrap, o);
}

void tensor_parallel(models::Gpt& m, const DeviceMesh& mesh) {
  parallelize_module(m, mesh, models::tensor_parallel_plan(m.options));
}

std::string tensor_parallel_difference(bool exact, int ranks, const models::GptOptions& o) {
  Trained serial = train(exact, nullptr, {.model = o});
  std::string found;
  run_ranks(ranks, [&](ProcessGroup& group) {
    DeviceMesh mesh = init_device_mesh({{"tp", group.size()}});
    Trained t = train(exact, [&](models::Gpt& m) { tensor_parallel(m, mesh); }, {.model = o});
    std::string d = difference(t, serial);
    if (t.losses != serial.losses) d = d.empty() ? "losses" : d;
    if (group.rank() == 0) found = d;
  });
  return found;
}

TEST(ExactContraction, TensorParallelTrainingHasTheBitsOfSerial) {
  for (double dropout : {0.0, 0.2})
    for (int ranks : {1, 2, 4})
      EXPECT_EQ(tensor_parallel_difference(true, ranks, model(dropout)), "")
          << ranks << " ranks, dropout " << dropout;
}
TEST(ExactContraction, UntiedHeadAndEightRanks) {
  models::GptOptions o = model(0.1, false);
  o.heads = 8;
  for (int ranks : {2, 8}) EXPECT_EQ(tensor_parallel_difference(true, ranks, o), "") << ranks;
}
// Ranks without heads add +0.
TEST(ExactContraction, MoreRanksThanHeads) {
  models::GptOptions o = model(0);
  o.heads = 2;
  EXPECT_EQ(tensor_parallel_difference(true, 4, o), "");
}
TEST(ExactContraction, WithoutItBitsDiffer) {
  for (int ranks : {2, 4}) EXPECT_NE(tensor_parallel_difference(false, ranks, model(0)), "");
}

std::string two_axes_difference(bool exact, int dp, int tp) {
  const models::GptOptions o = model(0.1);
  Trained serial;
  run_ranks(1, [&](ProcessGroup&) {
    serial = train(exact, [](models::Gpt& m) { fully_shard(m, {.tree_accumulation = true}); },
                   {.model = o, .micro_batches = 4});
  });
  std::string found;
  run_ranks(dp * tp, [&](ProcessGroup& group) {
    DeviceMesh mesh = init_device_mesh({{"dp", dp}, {"tp", tp}});
    Trained t = train(
        exact,
        [&](models::Gpt& m) {
          tensor_parallel(m, mesh["tp"]);
          fully_shard(m, {.mesh = mesh["dp"], .tree_accumulation = true});
        },
        {.model = o, .dp_ranks = dp, .dp_rank = mesh.coordinate("dp"), .micro_batches = 4 / dp});
    std::string d = difference(t, serial);
    if (group.rank() == 0) found = d;
  });
  return found;
}

TEST(ExactContraction, WithFullyShardedParameters) {
  for (auto [dp, tp] : {std::pair{2, 2}, {4, 2}, {1, 4}})
    EXPECT_EQ(two_axes_difference(true, dp, tp), "") << dp << " x " << tp;
  EXPECT_NE(two_axes_difference(false, 2, 2), "");
}

// A loop of 12 has 4 leaves: 2 or 4 ranks may share it. A cut that is no subtree is refused, on
// every rank.
TEST(ExactContraction, CutsThatAreNoSubtreeAreRefused) {
  auto product = [](int ranks, int64_t k, int64_t unit) {
    std::string text;
    run_ranks(ranks, [&](ProcessGroup& group) {
      ExactContraction exact;
      DeviceMesh mesh = init_device_mesh({{"tp", ranks}});
      Tensor x = cast(sample_values({5, k}, -1, 1, 1), kF32),
             w = cast(sample_values({3, k}, -1, 1, 2), kF32), want = linear(x, w);
      Layout cut{Shard(1, unit)};
      try {
        Tensor y = full_tensor(linear(distribute(x, mesh, cut), distribute(w, mesh, cut)));
        TESSERA_ASSERT(std::memcmp(y.raw(), want.raw(), y.nbytes()) == 0, "bits differ");
        if (group.rank() == 0) text = "same bits";
      } catch (const ShapeError& e) {
        if (group.rank() == ranks - 1) text = e.what();
      }
    });
    return text;
  };
  for (auto [ranks, k, unit] : {std::tuple{2, 12, 1},
                                {4, 12, 3},
                                {2, 6, 3},
                                {8, 64, 1},
                                {8, 12, 3},
                                {2, 2, 1},
                                {4, 1000, 5}})
    EXPECT_EQ(product(ranks, k, unit), "same bits") << ranks << ' ' << k << ' ' << unit;
  for (auto [ranks, k, unit] :
       {std::tuple{2, 7, 1}, {8, 12, 1}, {3, 12, 1}, {4, 6, 1}, {2, 40, 8}}) {
    std::string e = product(ranks, k, unit);
    EXPECT_NE(e.find(fmt::format("whose extent is {}", k)), e.npos) << e;
  }
}

// Later axes cut first and are reduced last, so a loop that two axes cut is still one tree.
TEST(ExactContraction, TwoAxesMayCutALoop) {
  for (auto [a, b] : {std::pair{2, 2}, {2, 4}, {4, 2}})
    run_ranks(a * b, [&, a = a, b = b](ProcessGroup&) {
      ExactContraction exact;
      DeviceMesh mesh = init_device_mesh({{"a", a}, {"b", b}});
      for (int64_t rows : {3, 300}) {
        Tensor x = cast(sample_values({rows, 64}, -1, 1, 1), kF32),
               w = cast(sample_values({9, 64}, -1, 1, 2), kF32), want = linear(x, w);
        Layout cut{Shard(1), Shard(1)};
        Tensor y = full_tensor(linear(distribute(x, mesh, cut), distribute(w, mesh, cut)));
        TESSERA_ASSERT(std::memcmp(y.raw(), want.raw(), y.nbytes()) == 0, "bits differ");
      }
    });
}

// A sum over ranks does not pass through a product: (x0 + x1) w is not x0 w + x1 w to the bit.
TEST(ExactContraction, OperandsAreReducedFirst) {
  run_ranks(2, [](ProcessGroup& group) {
    ExactContraction exact;
    DeviceMesh mesh = init_device_mesh({{"tp", 2}});
    auto term = [](int rank) { return cast(sample_values({7, 24}, -1, 1, 10 + rank), kF32); };
    Tensor w = cast(sample_values({9, 24}, -1, 1, 3), kF32), want = linear(term(0) + term(1), w),
           x = from_local(term(group.rank()), mesh, {Partial()});
    ReplicatePlain same;
    AllowCommunication allowed;
    Tensor y = full_tensor(linear(x, w));
    TESSERA_ASSERT(std::memcmp(y.raw(), want.raw(), want.nbytes()) == 0, "bits differ");
  });
}

TEST(ExactContraction, SixteenBitFloatsAreNotCut) {
  run_ranks(2, [](ProcessGroup&) {
    ExactContraction exact;
    DeviceMesh mesh = init_device_mesh({{"tp", 2}});
    Tensor x = distribute(cast(sample_values({5, 8}, -1, 1, 1), kBF16), mesh, {Shard(1)});
    std::string text;
    try {
      linear(x, x);
    } catch (const ShardingError& e) {
      text = e.what();
    }
    TESSERA_ASSERT(text.find("must be whole") != text.npos, "{}", text);
  });
}

TEST(ExactContraction, SequenceParallelIsRefused) {
  run_ranks(2, [](ProcessGroup&) {
    ExactContraction exact;
    DeviceMesh mesh = init_device_mesh({{"tp", 2}});
    auto m = models::gpt(test::small_gpt());
    parallelize_module(*m, mesh, models::tensor_parallel_plan(m->options, true));
    std::string text;
    try {
      LossParallel allowed;
      m->loss(test::ids(0, 0, 8), test::ids(1, 0, 8));
    } catch (const UserError& e) {
      text = e.what();
    }
    TESSERA_ASSERT(text.find("sequence_parallel") != text.npos, "{}", text);
  });
}

}  // namespace
}  // namespace tessera::parallel
