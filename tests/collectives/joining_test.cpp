// A rank that ends while others join: they are told at once who it was and how it ended, at
// whatever stage of joining they wait for it.
#include "collectives/joining.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <latch>
#include <map>
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

// A socket that listens, and its address as Gloo writes it. Of two ports Gloo connects from the
// higher one, by their bytes in the order of the network: any that a system gives away.
class SlowListener {
 public:
  SlowListener() {
    address_.sin_family = AF_INET, address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int port = 1024; port < 10'000; port += 256) {
      address_.sin_port = htons(uint16_t(port));
      if (bind(fd_, reinterpret_cast<sockaddr*>(&address_), sizeof address_) == 0) break;
    }
    EXPECT_EQ(listen(fd_, 1), 0);
  }
  ~SlowListener() { close(fd_); }
  void replace_in(std::string& gloos) const {
    std::memcpy(gloos.data(), &address_, sizeof address_);
  }
  void await_connection() const {
    pollfd ready{.fd = fd_, .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&ready, 1, 30'000), 1);
  }
  // What Gloo does with a connection, and whether it could.
  bool accept_and_ask() const {
    const int fd = accept(fd_, nullptr, nullptr);
    sockaddr_storage peer{};
    socklen_t size = sizeof peer;
    const bool known = getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0;
    close(fd);
    return known;
  }

 private:
  const int fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in address_{};
};

// The store of a rank that calls `connecting` instead of connecting to rank 0.
class AbsentStore final : public PrefixStore {
 public:
  AbsentStore(std::shared_ptr<Store> store, std::function<void(std::string&)> address,
              std::function<void()> connecting)
      : PrefixStore("", std::move(store)), address_(address), connecting_(connecting) {}
  void multi_set(std::span<const std::string> keys, std::span<const std::string> values) override {
    if (!keys[0].starts_with("pg/world/gloo/")) return PrefixStore::multi_set(keys, values);
    std::string mine = values[0];
    address_(mine);
    PrefixStore::multi_set(keys, {&mine, 1});
    connecting_();
    throw Ended();
  }

 private:
  const std::function<void(std::string&)> address_;
  const std::function<void()> connecting_;
};

// Rank 0 has connected to rank 1, which has not accepted yet, and waits for rank 2, which ends.
// Of a store that does not answer, and of ranks that do not come.
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

TEST(Joining, ConnectionsAreNotResetBeforeTheyAreAccepted) {
  if (!test::kHaveGloo) GTEST_SKIP() << "no gloo";
  auto store = std::make_shared<MemoryStore>();
  SlowListener listener;
  std::latch connected(1), accepted(1);
  auto absent = [&](int rank, auto address, auto connecting) {
    auto s = std::make_shared<AbsentStore>(store, address, connecting);
    EXPECT_THROW(detail::join_by_store(detail::make_world("world", rank, 3), options(s, "gloo")),
                 Ended);
  };
  std::thread slow([&] {
    absent(
        1, [&](std::string& a) { listener.replace_in(a); },
        [&] {
          listener.await_connection();
          connected.count_down();
          std::this_thread::sleep_for(detail::JoiningStore::kLook + Millis(50));
          EXPECT_TRUE(listener.accept_and_ask()) << std::strerror(errno);
          accepted.count_down();
        });
  });
  std::thread ending([&] {
    absent(
        2, [](std::string& a) { a[2] = a[3] = char(255); },  // which rank 0 lets connect
        [&] {
          connected.wait();
          announce_death(*store, 2, "signal 9 (Killed)");
          accepted.wait();
        });
  });
  try {
    detail::join_by_store(detail::make_world("world", 0, 3), options(store, "gloo"));
    ADD_FAILURE() << "rank 0 joined";
  } catch (const CommError& e) {
    EXPECT_EQ(e.ranks(), std::vector<int>{2}) << e.what();
  }
  slow.join();
  ending.join();
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

// The store of rank 0, whose first look at the others from beside the joining thread begins before
// rank 1 has said where it is, and finds it killed. It ends when the joining thread has looked,
// too, after connecting, or half a second later.
class SlowLookStore final : public PrefixStore {
 public:
  explicit SlowLookStore(std::shared_ptr<Store> store)
      : PrefixStore("", std::move(store)), joining_(std::this_thread::get_id()) {}
  int64_t num_keys(const std::string& prefix) override {
    if (prefix == kDeadPrefix && std::this_thread::get_id() != joining_ && !begun_.exchange(true)) {
      set("test/looking", "");
      const auto end = std::chrono::steady_clock::now() + Millis(500);
      while (!looked_ && std::chrono::steady_clock::now() < end)
        std::this_thread::sleep_for(Millis(1));
      announce_death(*this, 1, "signal 9 (Killed)");
    }
    const int64_t n = PrefixStore::num_keys(prefix);
    if (std::this_thread::get_id() == joining_ && PrefixStore::check(kAddress)) looked_ = true;
    return n;
  }

 private:
  const std::vector<std::string> kAddress = {"pg/world/gloo/1"};
  const std::thread::id joining_;
  std::atomic<bool> begun_ = false, looked_ = false;
};

// The store of rank 1, which says where it is while rank 0 looks.
class AwaitedStore final : public PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  void multi_set(std::span<const std::string> keys, std::span<const std::string> values) override {
    const std::string looking = "test/looking";
    if (keys[0] == "pg/world/gloo/1") PrefixStore::wait({&looking, 1}, Millis(30'000));
    PrefixStore::multi_set(keys, values);
  }
};

// A look that ends after the joining thread's would close pairs that count as connected.
TEST(Joining, WhatALookFindsWhileTheLastPairConnectsIsTold) {
  if (!test::kHaveGloo) GTEST_SKIP() << "no gloo";
  auto store = std::make_shared<MemoryStore>();
  Ref<ProcessGroup> killed;
  std::thread other([&] {
    auto awaited = std::make_shared<AwaitedStore>("", store);
    try {
      killed = detail::join_by_store(detail::make_world("world", 1, 2), options(awaited, "gloo"));
    } catch (const CommError&) {  // rank 0 closed the connection, or the death is its own
    }
  });
  expect_told(options(std::make_shared<SlowLookStore>(store), "gloo"), 0, "signal 9 (Killed)");
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
