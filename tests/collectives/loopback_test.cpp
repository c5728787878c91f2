// The shared-memory algorithm with ranks as threads: all verbs, equal bits, overlap, sub-groups. It
// also runs under ThreadSanitizer.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <latch>
#include <random>
#include <thread>

#include "collectives/decorators/counting.h"
#include "collectives/loopback/run_ranks.h"
#include "collectives/shm/cpu.h"
#include "collectives/shm/tuner.h"
#include "core/base/boundary.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/collectives/verbs.h"
#include "tests/support/boundaries.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

constexpr int kSizes[] = {1, 2, 3, 4, 8};

TEST(Loopback, EveryVerbAndDtypeIsRight) {
  for (int size : kSizes) run_ranks(size, [](ProcessGroup& g) { test::check_all_verbs(g, 5); });
}

TEST(Loopback, LargeTensorsInPlaceAndStaged) {
  for (bool in_place : {true, false})
    for (int size : {1, 2, 3, 4})
      for (int64_t n : {2061, 150'001})
        run_ranks(size, [n](ProcessGroup& g) { test::check_verbs(g, kF32, n); },
                  {.read_in_place = in_place});
}

// Results of the first window lie where the second one gives.
TEST(Loopback, WhatIsGivenMayLieAmongTheResults) {
  const int64_t n = 400'000;
  run_ranks(2, [&](ProcessGroup& g) {
    Tensor out = zeros({2 * n}), in = slice(out, 0, n / 4, n / 4 + n), value = arange(0, n) + 0.5;
    value = value.to(kF32) + double(g.rank());
    assign_(in, value);
    g.all_gather(out, in);
    for (int r : {0, 1})
      EXPECT_TRUE(
          allclose(slice(out, 0, r * n, (r + 1) * n), value + double(r - g.rank()), 0.0, 0.0))
          << "of rank " << r << " on " << g.rank();
  });
}

TEST(Loopback, EmptyTensors) {
  run_ranks(3, [](ProcessGroup& g) { test::check_verbs(g, kF32, 0); });
}

/// ((r0+r1)+(r2+r3))+..., one element at a time.
float tree(const std::vector<float>& v, size_t low, size_t high) {
  if (high - low == 1) return v[low];
  size_t half = 1;
  while (half * 2 < high - low) half *= 2;
  return tree(v, low, low + half) + tree(v, low + half, high);
}

float term(int rank, int64_t i) {
  return std::sin(float(rank * 1000 + i)) * std::exp2(float(i % 40 - 20));
}

TEST(Loopback, SumsAreTheTreesBitForBit) {
  for (int size = 1; size <= 8; ++size)
    for (int64_t n : {1, 1000, 100'000})
      for (bool in_place : {true, false})
        run_ranks(size,
                  [&](ProcessGroup& g) {
                    Tensor t = empty({n});
                    for (int64_t i = 0; i < n; ++i) t.data<float>()[i] = term(g.rank(), i);
                    g.all_reduce(t);
                    std::vector<float> terms(static_cast<size_t>(size));
                    for (int64_t i = 0; i < n; ++i) {
                      for (int r = 0; r < size; ++r) terms[size_t(r)] = term(r, i);
                      TESSERA_CHECK(t.data<float>()[i] == tree(terms, 0, terms.size()),
                                    "element {}", i);
                    }
                  },
                  {.read_in_place = in_place});
}

// Ranks are threads; the second call finds what the first has left in shared memory.
void expect_sums_of_the_tree(int size, int64_t n, detail::Way way) {
  run_ranks(size,
            [&](ProcessGroup& g) {
              Tensor t = empty({n});
              std::vector<float> terms(static_cast<size_t>(size));
              for (int call = 0; call < 2; ++call) {
                for (int64_t i = 0; i < n; ++i) t.data<float>()[i] = term(g.rank(), i + call);
                g.all_reduce(t);
                for (int64_t i = 0; i < n; ++i) {
                  for (int r = 0; r < size; ++r) terms[size_t(r)] = term(r, i + call);
                  TESSERA_CHECK(t.data<float>()[i] == tree(terms, 0, terms.size()),
                                "way {}, call {}, element {}", int(way), call, i);
                }
              }
            },
            {.way = way});
}

constexpr detail::Way kWays[] = {detail::Way::kInPlace, detail::Way::kStreamed,
                                 detail::Way::kStaged};

TEST(Loopback, EachWayOfAnAllReduceGivesTheTreesBits) {
  for (detail::Way way : kWays)
    for (int size : {2, 3})
      for (int64_t n : {2000, 10'000, 100'000, 300'001}) expect_sums_of_the_tree(size, n, way);
}

TEST(Loopback, SumsBesideEachLimitHaveTheTreesBits) {
  CountBoundaries counting;
  // Cache lines of 16 floats: what ranks reduce alone; two slices of 255, 256, 257; what goes with
  // the first phase; a window of the staging area.
  for (detail::Way way : kWays)
    for (int64_t lines : {63, 64, 65, 511, 514, 1023, 1024, 1025, 8191, 8192, 8193})
      expect_sums_of_the_tree(2, 16 * lines, way);
  EXPECT_EQ(test::not_met({"shm"}), "");
}

// Areas that are used again hold nothing that a slower rank still has to read.
TEST(Loopback, SmallCallsInAnyOrderMeetNoValuesOfOthers) {
  for (int size : {2, 3, 4})
    run_ranks(size, [size](ProcessGroup& g) {
      std::mt19937 order(7), pauses(uint32_t(g.rank()));
      for (int call = 0; call < 2000; ++call) {
        const int64_t n = 1 + int64_t(order() % 300);
        for (uint32_t i = pauses() % 300; i > 0; --i) detail::relax();
        auto mine = [&](int rank) { return float(call + 1000 * rank); };
        float want = 0;
        for (int r = 0; r < size; ++r) want += mine(r);
        switch (order() % 4) {
          case 0: g.barrier(); break;
          case 1: {
            Tensor t = full({n}, mine(g.rank())), out = empty({n * size});
            g.all_gather(out, t);
            for (int64_t i = 0; i < n * size; ++i)
              TESSERA_CHECK(out.data<float>()[i] == mine(int(i / n)), "all_gather, call {}", call);
            break;
          }
          default: {  // one phase, or two
            Tensor t = full({n * int64_t(1 + order() % 20)}, mine(g.rank()));
            g.all_reduce(t);
            for (int64_t i = 0; i < t.numel(); ++i)
              TESSERA_CHECK(t.data<float>()[i] == want, "all_reduce, call {}, {}", call, i);
          }
        }
      }
    });
}

TEST(Loopback, SumsHaveEqualBitsWhicheverWayIsTried) {
  for (int size : {2, 3, 4}) run_ranks(size, [](ProcessGroup& g) { test::check_ways(g); });
}

TEST(Loopback, AsynchronousCallsOverlapAndKeepTheirOrder) {
  std::latch gone_on(1);
  run_ranks(2, [&](ProcessGroup& g) {
    std::vector<Tensor> tensors;
    for (int k = 0; k < 50; ++k) {
      Tensor t = empty({2000});
      std::fill_n(t.data<float>(), 2000, float(k + g.rank()));
      g.all_reduce_async(t);
      tensors.push_back(t);
    }
    g.barrier();  // after all of them
    for (int k = 0; k < 50; ++k)
      ASSERT_EQ(tensors[size_t(k)].data<float>()[1999], float(2 * k + 1));
    if (g.rank() == 0) gone_on.wait();
    Tensor t = empty({4});
    Ref<Work> work = g.broadcast_async(t, 0);
    if (g.rank() == 1) {
      EXPECT_FALSE(work->wait_for(Millis(0)));  // the caller goes on while rank 0 is late
      gone_on.count_down();
    }
    work->wait();
    EXPECT_TRUE(work->done());
    EXPECT_GE(work->elapsed_ms(), 0);
  });
}

class CountedEnd final : public RefCounted {
 public:
  explicit CountedEnd(std::atomic<int>& ends) : ends_(ends) {}
  ~CountedEnd() override { ++ends_; }

 private:
  std::atomic<int>& ends_;
};

TEST(Loopback, ResultsOfAPendingCollectiveMayBeDropped) {
  constexpr int kCalls = 100;
  constexpr int64_t n = 1000;
  std::vector<float> memory[2];
  std::atomic<int> freed[2];
  std::latch all_dropped(1);
  run_ranks(2, [&](ProcessGroup& g) {
    const size_t r = size_t(g.rank());
    memory[r].assign(size_t(kCalls * n), float(r + 1));
    if (r == 1) all_dropped.wait();  // so that those of rank 0 are pending
    for (int k = 0; k < kCalls; ++k) {
      Tensor t(Meta::contiguous({n}, kF32, kCPU),
               make_ref<Storage>(memory[r].data() + k * n, n * sizeof(float), kCPU,
                                 make_ref<CountedEnd>(freed[r])));
      g.all_reduce_async(t);
    }
    if (r == 0) {
      EXPECT_EQ(freed[0], 0);
      all_dropped.count_down();
    }
    g.flush();
    EXPECT_EQ(freed[r], kCalls);
    EXPECT_EQ(std::ranges::count(memory[r], 3.0f), kCalls * n);
  });
}

TEST(Loopback, NewGroupsAreOfTheRanksNamed) {
  run_ranks(4, [](ProcessGroup& g) {
    EXPECT_EQ(get_rank(), g.rank());
    EXPECT_EQ(get_world_size(), 4);
    Ref<ProcessGroup> part = g.new_group({3, 0, 1});  // in this order
    if (g.rank() == 2) {
      ASSERT_FALSE(part);
    } else {
      ASSERT_EQ(part->size(), 3);
      ASSERT_EQ(part->rank(), g.rank() == 3 ? 0 : g.rank() + 1);
      test::check_verbs(*part, kF32, 5);
    }
    EXPECT_THROW(g.new_group({0, 4}), UserError);
    EXPECT_THROW(g.new_group({1, 1}), UserError);
    g.barrier();
  });
}

TEST(Loopback, SplitsIntoGroupsThatWorkAndNest) {
  run_ranks(6, [](ProcessGroup& g) {
    Ref<ProcessGroup> part = g.split(g.rank() % 2, -g.rank());
    ASSERT_EQ(part->size(), 3);
    ASSERT_EQ(part->rank(), 2 - g.rank() / 2);  // keys reverse the order
    ASSERT_EQ(part->global_rank(part->rank()), g.rank());
    test::check_verbs(*part, kF32, 7);
    Ref<ProcessGroup> leaf = part->split(part->rank() == 0 ? -1 : 5);
    if (part->rank() == 0) {
      ASSERT_FALSE(leaf);
    } else {
      test::check_verbs(*leaf, kI64, 3);
    }
    part.reset();  // before its child
    if (leaf) leaf->barrier();
    g.barrier();
  });
}

TEST(Loopback, ArgumentsThatCannotWorkAreRefusedAlone) {
  run_ranks(2, [](ProcessGroup& g) {
    Tensor t = empty({3}), ints = empty({3}, kI32);
    EXPECT_THROW(g.all_reduce(ints, ReduceOp::kAvg), UserError);
    EXPECT_THROW(g.all_reduce(t, ReduceOp::kBitOr), UserError);
    expect_contains(
        error_of([&] { g.all_reduce(empty({3}, kF8E4M3)); }),
        "all_reduce: no sum of f8e4m3; it is a storage format, convert it by .to(kF32)");
    EXPECT_THROW(g.broadcast(t, 2), UserError);
    EXPECT_THROW(g.all_gather(t, t), ShapeError);
    expect_contains(error_of([&] { g.all_gather(empty({8}), t); }),
                    "all_gather: in and this rank's piece of out differ: 3 and 4 elements");
    EXPECT_THROW(g.send(t, g.rank()), UserError);
    EXPECT_THROW(g.reduce_scatter(ints, empty({6})), UserError);
    EXPECT_THROW(g.all_reduce(Tensor()), UserError);
    const int64_t ones[] = {1, 1};
    const Tensor two = empty({2}), others = empty({2});
    expect_contains(error_of([&] { g.all_to_all(others, two, ones, {}); }),
                    "in_splits has 0 counts for 2 ranks");
    expect_contains(error_of([&] { g.all_to_all(others, two, {}, ones); }),
                    "out_splits has 0 counts for 2 ranks");
    g.all_reduce(t);  // the group lives on
  });
}

TEST(Loopback, BackendsOfProcessesAreRefusedByName) {
  try {
    run_ranks(2, [](ProcessGroup&) {}, {.backend = "shm"});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const UserError& e) {
    EXPECT_NE(std::string(e.what()).find(
                  "no backend \"shm\" for ranks that are threads; use loopback or gloo"),
              std::string::npos)
        << e.what();
  }
}

TEST(Loopback, TraitsOfKinds) {
  for (int k = 0; k < kNumCollKinds; ++k)
    EXPECT_EQ(parse_coll_kind(name_of(CollKind(k))), CollKind(k));
  EXPECT_TRUE(traits(CollKind::kReduce).reduces && traits(CollKind::kReduce).rooted);
  EXPECT_TRUE(traits(CollKind::kRecv).p2p && !traits(CollKind::kBarrier).p2p);
  EXPECT_EQ(name_of(CollKind::kReduceScatter), "reduce_scatter");
}

TEST(Loopback, CountingDecoratorSeesEveryCall) {
  run_ranks(2, [](ProcessGroup& g) {
    CountingGroup counted{Ref<ProcessGroup>(&g)};
    counted.all_reduce(empty({10}));
    static_cast<ProcessGroup&>(counted).split(0)->barrier();
    EXPECT_EQ(counted.counts().calls(CollKind::kAllReduce), 1);
    EXPECT_EQ(counted.counts().bytes(CollKind::kAllReduce), 40);
    EXPECT_EQ(counted.counts().calls(CollKind::kBarrier), 1);
  });
}

TEST(World, OneRankNeedsNothing) {
  std::thread([] {
    EXPECT_EQ(world().size(), 1);
    test::check_all_verbs(world(), 4);
    destroy_process_group();
  }).join();
}

TEST(Loopback, ReduceAndBarrierMayBeAwaited) {
  run_ranks(3, [](ProcessGroup& g) {
    Tensor t = full({5}, g.rank() + 1.0);
    Ref<Work> sum = g.reduce_async(t, 2), all = g.barrier_async();
    all->wait();
    EXPECT_TRUE(sum->done());  // calls keep their order
    EXPECT_EQ(t.data<float>()[4], g.rank() == 2 ? 6 : g.rank() + 1);
  });
}

TEST(World, AThreadWithoutOneIsToldOfBothWaysToGetIt) {
  setenv("WORLD_SIZE", "2", 1);
  setenv("RANK", "0", 1);
  std::thread([] {
    try {
      world();
      ADD_FAILURE() << "no error";
    } catch (const UserError& e) {
      EXPECT_NE(std::string(e.what()).find("init_process_group()"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("set_world(group)"), std::string::npos) << e.what();
    }
  }).join();
  unsetenv("WORLD_SIZE");
  unsetenv("RANK");
}

}  // namespace
}  // namespace tessera
