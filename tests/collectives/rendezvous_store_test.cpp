// A rank ends while others join: they are told at once which rank it was and how it ended, at
// whatever stage of joining they wait for it.
#include "collectives/rendezvous_store.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <latch>
#include <map>
#include <thread>

#include "collectives/rendezvous.h"
#include "collectives/store/liveness.h"
#include "collectives/store/memory_store.h"
#include "core/ops/create.h"
#include "tests/collectives/verbs.h"

namespace tessera {
namespace {

using detail::JoinOptions;

// Thrown by a rank's store when the rank is to end.
struct Ended {};
constexpr const char* kHow = "signal 9 (Killed)";

// The store of a rank that ends when it has set or read the key `last`, which its launcher then
// announces. What the rank has open stays open until the other is `told`, so that only the
// announcement can tell it.
class EndingStore final : public PrefixStore {
 public:
  EndingStore(std::shared_ptr<Store> store, int rank, std::string last, std::latch& told)
      : PrefixStore("", std::move(store)), rank_(rank), last_(std::move(last)), told_(told) {}
  void multi_set(std::span<const std::string> keys, std::span<const std::string> values) override {
    if (keys[0] == last_) announce_death(*this, rank_, kHow);
    PrefixStore::multi_set(keys, values);
    if (keys[0] == last_) end();
  }
  std::vector<std::string> multi_get(std::span<const std::string> keys, Millis timeout) override {
    std::vector<std::string> values = PrefixStore::multi_get(keys, timeout);
    if (keys[0] == last_) {
      announce_death(*this, rank_, kHow);
      end();
    }
    return values;
  }

 private:
  [[noreturn]] void end() {
    told_.wait();
    throw Ended();
  }

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

// Joins a world of two as `rank`, and expects an error that the other has ended.
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
    std::string backend;
    std::array<std::string, 2> last;  // of either victim
  };
  std::vector<Stage> stages = {{"", {"pg/world/0", "pg/world/1"}}};
  if (test::kHaveGloo)  // rank 0 says where it takes connections, rank 1 reads it
    stages.insert(stages.end(), {{"gloo", {"pg/world/0", "pg/world/1"}},
                                 {"gloo", {"pg/world/gloo/0", "pg/world/gloo/0"}}});
  for (const auto& [backend, last] : stages)
    for (int victim : {0, 1}) {
      SCOPED_TRACE(fmt::format("{} {}, rank {}", backend, last[size_t(victim)], victim));
      auto store = std::make_shared<MemoryStore>();
      std::latch told(1);
      std::thread other([&] {
        auto ending = std::make_shared<EndingStore>(store, victim, last[size_t(victim)], told);
        EXPECT_THROW(
            detail::join_by_store(detail::make_world("world", victim, 2), options(ending, backend)),
            Ended);
      });
      expect_told(options(store, backend), 1 - victim, kHow);
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

// Rank 2 does not join, so rank 0 gives up and ends, which rank 1 learns before its own deadline.
TEST(Joining, ARankThatEndsBecauseAnotherDidNotComeLeadsToThatOne) {
  auto store = std::make_shared<MemoryStore>();
  std::thread rank0([&] {
    const std::string rank1 = "pg/world/1";
    store->wait({&rank1, 1}, Millis(120'000));
    JoinOptions o = options(store, "");
    o.join_timeout = Millis(300);
    try {
      detail::join_by_store(detail::make_world("world", 0, 3), o);
      ADD_FAILURE() << "rank 0 joined";
    } catch (const CommError& e) {
      EXPECT_NE(std::string(e.what()).find("rank 2 of 3 did not join world within 0.3 s"),
                std::string::npos)
          << e.what();
      EXPECT_EQ(e.culprits(), std::vector<int>{2});
    }
    EXPECT_EQ(cause_of_failure(*store), std::vector<int>{2});
    announce_death(*store, 0, "exit status 1");
  });
  try {
    detail::join_by_store(detail::make_world("world", 1, 3), options(store, ""));
    ADD_FAILURE() << "rank 1 joined";
  } catch (const CommError& e) {
    EXPECT_NE(std::string(e.what()).find("rank 0 ended before all ranks had joined world: exit "
                                         "status 1; it failed before: init_process_group: rank 2"),
              std::string::npos)
        << e.what();
    EXPECT_EQ(e.culprits(), std::vector<int>{2});
  }
  rank0.join();
}

TEST(Joining, RankZeroThatDoesNotComeIsNamed) {
  JoinOptions o = options(std::make_shared<MemoryStore>(), "");
  o.join_timeout = Millis(300);
  try {
    detail::join_by_store(detail::make_world("world", 1, 2), o);
    ADD_FAILURE() << "rank 1 joined";
  } catch (const CommError& e) {
    EXPECT_NE(std::string(e.what()).find("rank 0 of 2 did not join world within 0.3 s"),
              std::string::npos)
        << e.what();
    EXPECT_EQ(e.culprits(), std::vector<int>{0});
  }
}

// The timeout holds for a store that does not answer, and for ranks that do not join.
TEST(Joining, TheTimeoutOfAGroupIsThatOfJoiningToo) {
  int silent = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  socklen_t size = sizeof address;
  address.sin_family = AF_INET, address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(silent, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(silent, 1), 0);
  getsockname(silent, reinterpret_cast<sockaddr*>(&address), &size);
  const std::map<std::string, std::string> job{
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(ntohs(address.sin_port))},
      {"TESSERA_STORE_KEY", "key"}};
  for (const auto& [name, value] : job) setenv(name.c_str(), value.c_str(), 1);
  for (bool silent_store : {true, false}) {
    GroupOptions o;
    o.rank = 0, o.world_size = 2, o.timeout = Millis(300);
    if (!silent_store) o.store = std::make_shared<MemoryStore>();
    auto start = std::chrono::steady_clock::now();
    EXPECT_THROW(init_process_group(o), Error);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  }
  for (const auto& [name, value] : job) unsetenv(name.c_str());
  close(silent);
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
  const std::vector<std::string> kAddress = {"pg/world/gloo/0"};
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

// Ends of ranks that are not members do not matter.
TEST(Joining, OthersMayHaveEnded) {
  auto store = std::make_shared<MemoryStore>();
  announce_death(*store, 2, "exit status 3");
  announce_departure(*store, 3);
  auto meet = [&](int rank) {
    Tensor t = full({4}, rank + 1.0);
    EXPECT_NO_THROW(detail::join_by_store(detail::make_world("world", rank, 2), options(store, ""))
                        ->all_reduce(t));
    EXPECT_EQ(t.data<float>()[3], 3);
  };
  std::thread other(meet, 1);
  meet(0);
  other.join();
}

}  // namespace
}  // namespace tessera
