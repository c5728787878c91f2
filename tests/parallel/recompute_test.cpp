// Blocks that backward computes again, under every wrapper: the bits are those of the same wrapper
// without.
#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "core/nn/nn.h"
#include "examples/models/gpt.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "parallel/tensor_parallel.h"
#include "tests/parallel/small_gpt.h"

namespace tessera::parallel {
namespace {

using Wrap = std::function<void(models::Gpt&)>;

// Trains with no, selective and full recomputation and compares bits. `rows`: ranks share a batch.
void expect_same_bits(ProcessGroup& group, bool rows, const Wrap& wrap) {
  test::TrainOptions o;
  o.model.dropout = 0.2;
  if (rows) o.dp_ranks = group.size(), o.dp_rank = group.rank();
  test::Trained want = test::train(wrap, o);
  for (bool selective : {false, true}) {
    test::Trained got = test::train(
        [&](models::Gpt& m) {
          if (wrap) wrap(m);
          for (auto& [path, block] : nn::numbered_modules(m))
            block->recompute(selective ? keeping_products() : RecomputeOptions{});
        },
        o);
    test::check_close(got, want, 0);
  }
}

TEST(Recompute, DataParallel) {
  run_ranks(2, [](ProcessGroup& group) {
    std::unique_ptr<Reducer> reducer;
    expect_same_bits(group, true, [&](models::Gpt& m) {
      reducer.reset();
      reducer = make_reducer(m, {.group = Ref<ProcessGroup>(&group)});
    });
  });
}

TEST(Recompute, FullySharded) {
  for (bool reshard : {true, false})
    run_ranks(2, [&](ProcessGroup& group) {
      expect_same_bits(group, true, [&](models::Gpt& m) {
        fully_shard(m, {.reshard_after_forward = reshard, .prefetch = reshard});
      });
    });
}

TEST(Recompute, FullyShardedInMixedPrecision) {
  run_ranks(2, [&](ProcessGroup& group) {
    expect_same_bits(group, true, [&](models::Gpt& m) {
      fully_shard(m, {.precision = {.param = kF32, .reduce = kF32, .output = kF64}});
    });
  });
}

TEST(Recompute, TensorParallel) {
  for (bool sequence : {false, true})
    run_ranks(2, [&](ProcessGroup& group) {
      expect_same_bits(group, false, [&](models::Gpt& m) {
        parallelize_module(m, init_device_mesh({{"tp", 2}}),
                           models::tensor_parallel_plan(m.options, sequence));
      });
    });
}

TEST(Recompute, FullyShardedAndTensorParallel) {
  run_ranks(4, [&](ProcessGroup& group) {
    expect_same_bits(group, false, [&](models::Gpt& m) {
      DeviceMesh mesh = init_device_mesh({{"dp", 2}, {"tp", 2}});
      parallelize_module(m, mesh["tp"], models::tensor_parallel_plan(m.options));
      fully_shard(m, {.mesh = mesh["dp"]});
    });
  });
}

}  // namespace
}  // namespace tessera::parallel
