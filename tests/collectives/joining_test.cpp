// A rank that ends while others join: they are told at once who it was and how it ended, at
// whatever stage of joining they wait for it.
#include <gtest/gtest.h>

#include <latch>
#include <thread>

#include "collectives/join.h"
#include "collectives/store/liveness.h"
#include "collectives/store/memory_store.h"
#include "tests/collectives/verbs.h"

namespace tessera {
namespace {

using detail::JoinOptions;

// What a rank's store throws when the rank is to end.
struct Ended {};

// The store of a rank that ends when it has set the key `last`; its launcher says so. What the rank
// has open stays so until the other is `told`: Gloo ends the process, which is both ranks here,
// where a peer closes a connection that it is just accepting.
class EndingStore final : public PrefixStore {
 public:
  EndingStore(std::shared_ptr<Store> store, int rank, std::string last, std::latch& told)
      : PrefixStore("", std::move(store)), rank_(rank), last_(std::move(last)), told_(told) {}
  void multi_set(std::span<const std::string> keys, std::span<const std::string> values) override {
    PrefixStore::multi_set(keys, values);
    if (keys[0] != last_) return;
    announce_death(*this, rank_, "signal 9 (Killed)");
    told_.wait();
    throw Ended();
  }

 private:
  const int rank_;
  const std::string last_;
  std::latch& told_;
};

JoinOptions options(std::shared_ptr<Store> store, const std::string& backend) {
  return {.backend = backend,
          .store = std::move(store),
          .prefix = "pg/",
          .timeout = Millis(120'000),
          .join_timeout = Millis(120'000)};
}

// Joins a world of two as `rank`, and expects to be told that the other has ended.
void expect_told(const JoinOptions& o, int rank, const std::string& how) {
  const auto start = std::chrono::steady_clock::now();
  try {
    detail::join_by_store(detail::make_world("world", rank, 2), o);
    ADD_FAILURE() << "rank " << rank << " joined";
  } catch (const CommError& e) {
    EXPECT_EQ(e.ranks(), std::vector<int>{1 - rank}) << e.what();
    EXPECT_NE(std::string(e.what()).find(fmt::format(
                  "rank {} ended before all ranks had joined world: {}", 1 - rank, how)),
              std::string::npos)
        << e.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST(Joining, ARankThatEndsIsNamedAtEveryStage) {
  struct Stage {
    std::string backend, last;
  };
  std::vector<Stage> stages = {{"", "pg/world/"}};
  if (test::kHaveGloo)
    stages.insert(stages.end(), {{"gloo", "pg/world/"}, {"gloo", "pg/world/gloo/"}});
  for (const auto& [backend, last] : stages)
    for (int victim : {0, 1}) {
      SCOPED_TRACE(fmt::format("{} {}{}", backend, last, victim));
      auto store = std::make_shared<MemoryStore>();
      std::latch told(1);
      std::thread other([&] {
        auto ending =
            std::make_shared<EndingStore>(store, victim, last + std::to_string(victim), told);
        EXPECT_THROW(
            detail::join_by_store(detail::make_world("world", victim, 2), options(ending, backend)),
            Ended);
      });
      expect_told(options(store, backend), 1 - victim, "signal 9 (Killed)");
      told.count_down();
      other.join();
    }
}

TEST(Joining, ARankThatNeverCameIsNamed) {
  for (bool failed : {true, false}) {
    auto store = std::make_shared<MemoryStore>();
    std::thread launcher([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      failed ? announce_death(*store, 1, "exit status 3") : announce_departure(*store, 1);
    });
    expect_told(options(store, ""), 0, failed ? "exit status 3" : "exit status 0");
    launcher.join();
  }
}

// The store of rank 0, which learns of departures only when rank 1 has joined and left.
class LateStore final : public PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  int64_t num_keys(const std::string& prefix) override {
    if (left_key(1).starts_with(prefix) && PrefixStore::check(kAddress)) {
      const std::string left = left_key(1);
      try {
        PrefixStore::wait({&left, 1}, Millis(5000));
      } catch (const StoreTimeout&) {  // rank 1 may wait for this rank's connection
      }
    }
    return PrefixStore::num_keys(prefix);
  }

 private:
  const std::vector<std::string> kAddress = {"pg/world/gloo/1"};
};

// A rank that has joined may leave at once: the slower ones have joined too.
TEST(Joining, ARankThatHasJoinedMayLeave) {
  if (!test::kHaveGloo) GTEST_SKIP() << "no gloo";
  auto store = std::make_shared<MemoryStore>();
  Ref<ProcessGroup> first;
  std::thread other([&] {
    first = detail::join_by_store(detail::make_world("world", 1, 2), options(store, "gloo"));
    announce_departure(*store, 1);
  });
  auto late = std::make_shared<LateStore>("", store);
  EXPECT_NO_THROW(detail::join_by_store(detail::make_world("world", 0, 2), options(late, "gloo")));
  other.join();
}

// Ends of ranks that are not asked to join are nobody's business.
TEST(Joining, OthersMayHaveEnded) {
  auto store = std::make_shared<MemoryStore>();
  announce_death(*store, 2, "exit status 3");
  announce_departure(*store, 3);
  auto meet = [&](int rank) {
    detail::join_by_store(detail::make_world("world", rank, 2), options(store, ""))->barrier();
  };
  std::thread other(meet, 1);
  meet(0);
  other.join();
}

}  // namespace
}  // namespace tessera
