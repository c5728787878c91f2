// Ranks read samples of their own, and drop elements by sample.
#include "parallel/sampler.h"

#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "core/data/compose.h"
#include "core/data/loader.h"
#include "core/ops/create.h"
#include "core/ops/random.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

// Numbers of the first two samples of each rank, as `sampler` has them.
std::vector<std::vector<int64_t>> read_by(int ranks,
                                          FunctionRef<data::DistributedSampler()> sampler) {
  std::vector<std::vector<int64_t>> out(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](ProcessGroup& g) {
    data::DistributedSampler own = sampler();
    for (const data::Sample& s : own.next()) out[size_t(g.rank())].push_back(s.number);
  });
  return out;
}

TEST(DistributedSampler, RanksOfAGroupOrOfDataAxesReadTheirOwn) {
  const data::SamplerOptions two{.dataset_size = 100, .micro_batch_size = 2};
  using Numbers = std::vector<std::vector<int64_t>>;
  EXPECT_EQ(read_by(2, [&] { return parallel::distributed_sampler(two); }),
            (Numbers{{0, 1}, {2, 3}}));
  auto half = [&] { return parallel::distributed_sampler(two, world().split(world().rank() / 2)); };
  EXPECT_EQ(read_by(4, half), (Numbers{{0, 1}, {2, 3}, {0, 1}, {2, 3}}));
  auto dp = [&] {
    return parallel::distributed_sampler(two, init_device_mesh({{"dp", 2}, {"tp", 2}})["dp"]);
  };
  EXPECT_EQ(read_by(4, dp), (Numbers{{0, 1}, {0, 1}, {2, 3}, {2, 3}}));
  auto hybrid = [&] {
    DeviceMesh mesh = init_device_mesh({{"replicate", 2}, {"shard", 2}, {"tp", 2}});
    return parallel::distributed_sampler(two, mesh.slice({"replicate", "shard"}));
  };
  EXPECT_EQ(read_by(8, hybrid),
            (Numbers{{0, 1}, {0, 1}, {2, 3}, {2, 3}, {4, 5}, {4, 5}, {6, 7}, {6, 7}}));
}

TEST(DistributedLoader, DealsThePassesOfADatasetToRanks) {
  auto data = std::make_shared<data::TensorDataset>(ones({10, 1}), arange(0, 10));
  for (const bool drop_last : {false, true}) {
    std::vector<std::vector<int64_t>> read(4), rows(4);
    run_ranks(2, [&](ProcessGroup& g) {
      const auto rank = size_t(g.rank());
      auto loader = parallel::distributed_loader(data, {.batch_size = 2, .drop_last = drop_last});
      for (data::Batch& batch : loader) {
        rows[rank].push_back(batch.rows());
        for (int64_t i = 0; i < batch.rows(); ++i)
          read[rank].push_back(batch.targets.values<int64_t>()[i]);
      }
      // And a group of this rank alone has them all.
      for (data::Batch& batch :
           parallel::distributed_loader(data, {.batch_size = 10}, solo_group()))
        rows[2 + rank].push_back(batch.rows());
    });
    using Numbers = std::vector<int64_t>;
    EXPECT_EQ(rows[0], drop_last ? (Numbers{2, 2}) : (Numbers{2, 2, 2}));
    EXPECT_EQ(rows[1], drop_last ? (Numbers{2, 2}) : (Numbers{2, 2, 0}));
    EXPECT_EQ(read[0], drop_last ? (Numbers{0, 1, 4, 5}) : (Numbers{0, 1, 4, 5, 8, 9}));
    EXPECT_EQ(read[1], (Numbers{2, 3, 6, 7}));
    EXPECT_EQ(rows[2], Numbers{10});
    EXPECT_EQ(rows[3], Numbers{10});
  }
}

// As in examples/TOUR.md, a rank with some rows of the batch drops what one rank with all of it
// does.
TEST(DistributedSampler, InASampleScopeAnElementIsDroppedOnAnyRankAlike) {
  constexpr int64_t n = 8;
  auto data = std::make_shared<data::TensorDataset>(ones({n, 5}), arange(0, n));
  std::vector<std::vector<float>> dropped(n);
  auto step = [&](int ranks, bool check) {
    run_ranks(ranks, [&](ProcessGroup&) {
      manual_seed(1);
      data::DataLoader loader(
          data, parallel::distributed_sampler({.dataset_size = n, .micro_batch_size = n / ranks}));
      data::Batch batch = *loader.next();
      SampleScope samples(batch.sample_numbers);
      Tensor y = dropout(batch.inputs, 0.5);
      for (int64_t row = 0; row < batch.rows(); ++row) {
        const int64_t sample = batch.sample_numbers.values<int64_t>()[size_t(row)];
        const float* first = y.data<float>() + 5 * row;
        const std::vector<float> values(first, first + 5);
        if (check)
          EXPECT_EQ(values, dropped[size_t(sample)]) << sample;
        else
          dropped[size_t(sample)] = values;
      }
    });
  };
  step(1, false);
  step(2, true);
  EXPECT_NE(dropped[0], dropped[n / 2]) << "by position they would be equal";
}

}  // namespace
}  // namespace tessera
