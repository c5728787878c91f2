// Ranks of several hosts, as threads that claim a host: shared memory within blocks, TCP between
// them.
#include "collectives/messages/hierarchical.h"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "collectives/loopback/run_ranks.h"
#include "collectives/rendezvous.h"
#include "collectives/store/memory_store.h"
#include "core/base/boundary.h"
#include "core/ops/create.h"
#include "tests/collectives/verbs.h"
#include "tests/support/boundaries.h"

namespace tessera::detail {
namespace {

int block_of_text(const std::string& hosts) {
  std::vector<std::string> names;
  for (char c : hosts) names.emplace_back(1, c);
  return block_of_hosts(names);
}

TEST(Blocks, ABlockIsARankOfEveryOrAPowerOfTwoOnOneHost) {
  EXPECT_EQ(block_of_text("aabb"), 2);
  EXPECT_EQ(block_of_text("aaaabbbb"), 4);
  EXPECT_EQ(block_of_text("aaaabb"), 2);
  EXPECT_EQ(block_of_text("aaaaaabbbbbb"), 2);
  EXPECT_EQ(block_of_text("aabbaa"), 2);
  EXPECT_EQ(block_of_text("aaaa"), 4);
  EXPECT_EQ(block_of_text("abab"), 1);
  EXPECT_EQ(block_of_text("aab"), 1);
  EXPECT_EQ(block_of_text("abbb"), 1);
  EXPECT_EQ(block_of_text("a"), 1);
}

TEST(Blocks, MembersKeepTheirNumbersInTheGroup) {
  const Membership all{.group = "g", .rank = 5, .size = 6, .world_ranks = {9, 8, 7, 6, 5, 4}};
  const Membership block = block_of(all, 2);
  EXPECT_EQ(block.rank, 1);
  EXPECT_EQ(block.size, 2);
  EXPECT_EQ(block.world_ranks, (std::vector{5, 4}));
  EXPECT_EQ(block.number(1), 5);
}

class BlockGroups : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::kHaveGloo) GTEST_SKIP() << "Gloo is left out of this build";
  }
};

// Rank r is on host hosts[r].
void run_on(const std::string& hosts, FunctionRef<void(ProcessGroup&)> body) {
  auto store = std::make_shared<MemoryStore>();
  const int n = int(hosts.size());
  std::vector<std::thread> ranks;
  for (int r = 0; r < n; ++r)
    ranks.emplace_back([&, r] {
      try {
        Ref<ProcessGroup> g =
            join_by_store(make_world("world", r, n), {.backend = "",
                                                      .store = store,
                                                      .prefix = "pg/",
                                                      .timeout = Millis(60'000),
                                                      .join_timeout = Millis(60'000),
                                                      .host = std::string(1, hosts[size_t(r)])});
        body(*g);
        g->flush();
      } catch (const std::exception& e) {
        ADD_FAILURE() << hosts << ", rank " << r << ": " << e.what();
        std::abort();  // the others wait for it
      }
    });
  for (std::thread& t : ranks) t.join();
}

TEST_F(BlockGroups, EveryVerbAndDtypeIsRight) {
  for (test::Memory memory : {test::Memory::kOwn, test::Memory::kGroup}) {
    run_on("aabb", [&](ProcessGroup& g) {
      EXPECT_EQ(g.backend(), "gloo+shm");
      test::check_all_verbs(g, 5, memory);
      test::check_all_verbs(g, 9001, memory);
    });
    for (const char* hosts : {"aabbcc", "aaaabbbb"})
      run_on(hosts, [&](ProcessGroup& g) {
        for (int64_t n : {50'001, 4097, 0}) test::check_verbs(g, kF32, n, memory);
      });
  }
}

TEST_F(BlockGroups, OneRankOfAHostIsNoBlock) {
  run_on("abab", [](ProcessGroup& g) {
    EXPECT_EQ(g.backend(), "gloo");
    test::check_verbs(g, kF32, 9001);
  });
}

TEST_F(BlockGroups, PartsOfAGroupHaveBlocksOfTheirOwn) {
  run_on("aaaabbbb", [](ProcessGroup& g) {
    Ref<ProcessGroup> host = g.split(g.rank() / 4), half = g.split(g.rank() % 4 / 2),
                      across = g.split(g.rank() % 4);
    EXPECT_EQ(host->backend(), "shm");
    EXPECT_EQ(half->backend(), "gloo+shm");
    EXPECT_EQ(across->backend(), "gloo");
    for (ProcessGroup* part : {host.get(), half.get(), across.get()})
      test::check_verbs(*part, kF64, 9001);
  });
}

// Returns what every rank gets from an all_reduce and a reduce_scatter of terms whose sums are
// rounded.
template <class Run>
std::vector<double> results_of(int n, int64_t count, DType dtype, ReduceOp op, Run run) {
  std::vector<double> results(size_t((n + 1) * count));
  run([&](ProcessGroup& g) {
    auto terms = [&](int64_t m) {
      Tensor t = empty({m}, kF64);
      for (int64_t i = 0; i < m; ++i)
        t.data<double>()[i] = 1 + std::sin(double(g.rank() * 1000 + i)) / 2;
      return t.to(dtype);
    };
    Tensor sum = terms(count), own = empty({count}, dtype);
    g.all_reduce(sum, op);
    g.reduce_scatter(own, terms(n * count), op);
    auto keep = [&](const Tensor& t, int64_t at) {
      Tensor wide = t.to(kF64);
      std::copy_n(wide.data<double>(), count, results.begin() + at * count);
    };
    if (g.rank() == n - 1) keep(sum, n);
    keep(own, g.rank());
  });
  return results;
}

TEST_F(BlockGroups, ReductionsEqualThoseOfOneHostBitForBit) {
  for (const char* hosts : {"aabb", "aabbcc", "aaaabbbb", "aaaaaabbbbbb"})
    for (DType dtype : {kF32, kF64, kBF16})
      for (ReduceOp op : {ReduceOp::kAvg, ReduceOp::kProduct}) {
        const int n = int(std::string(hosts).size());
        auto on_hosts = [&](auto body) { run_on(hosts, body); };
        auto on_one = [&](auto body) { run_ranks(n, body); };
        EXPECT_EQ(results_of(n, 20'000, dtype, op, on_hosts),
                  results_of(n, 20'000, dtype, op, on_one))
            << hosts << " " << name_of(dtype) << " " << name_of(op);
      }
}

// Results of all elements, at the sizes from which on slices and blocks of ranks share the work.
TEST_F(BlockGroups, ReductionsBesideEachLimitEqualThoseOfOneHost) {
  CountBoundaries counting;
  for (int64_t lines : {255, 256, 257})
    for (const char* hosts : {"ab", "abab", "aabb"}) {
      const int n = int(std::string(hosts).size());
      const int64_t count = 16 * lines;  // floats of a cache line
      auto on_hosts = [&](auto body) { run_on(hosts, body); };
      auto on_one = [&](auto body) { run_ranks(n, body); };
      EXPECT_EQ(results_of(n, count, kF32, ReduceOp::kSum, on_hosts),
                results_of(n, count, kF32, ReduceOp::kSum, on_one))
          << hosts << ", " << count << " elements";
      // all_gather and reduce_scatter compare the size of the whole tensor with the limit.
      for (int64_t own : {count, count / n})
        run_on(hosts, [&](ProcessGroup& g) { test::check_verbs(g, kF32, own); });
    }
  EXPECT_EQ(test::not_met({"messages"}), "");
}

TEST_F(BlockGroups, CallsAreCountedOnceAndRunBesideOthers) {
  run_on("aabb", [](ProcessGroup& g) {
    Tensor a = full({20'000}, 1.0), b = full({20'000}, 2.0), c = full({3}, 3.0);
    for (int i = 0; i < 20; ++i) {
      a.data<float>()[7] = 1, c.data<float>()[0] = 3;
      Ref<Work> first = g.all_reduce_async(a, ReduceOp::kAvg),
                second = g.all_reduce_async(b, ReduceOp::kMax),
                third = g.all_reduce_async(c, ReduceOp::kSum);
      third->wait();
      EXPECT_TRUE(first->done() && second->done());
      EXPECT_EQ(third->seq(), first->seq() + 2);
      EXPECT_EQ(a.data<float>()[7], 1);
      EXPECT_EQ(b.data<float>()[19'999], 2);
      EXPECT_EQ(c.data<float>()[0], 12);
      g.all_reduce(b, ReduceOp::kMin);
    }
  });
}

}  // namespace
}  // namespace tessera::detail
