// The contract of a store, checked on each kind of store.
#include "collectives/store/store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "collectives/store/file_store.h"
#include "collectives/store/liveness.h"
#include "collectives/store/memory_store.h"
#include "collectives/store/sha256.h"
#include "collectives/store/tcp_server.h"
#include "collectives/store/tcp_store.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using Keys = std::vector<std::string>;

/// Hands out stores of one kind that see the same keys.
class StoreTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("tessera-store-" + detail::to_hex(detail::random_bytes(8)));
    if (GetParam() == "tcp") server_ = std::make_unique<TcpStoreServer>("127.0.0.1", 0, "secret");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::shared_ptr<Store> connect() {
    if (GetParam() == "file") return std::make_shared<FileStore>(folder_);
    if (GetParam() == "tcp")
      return std::make_shared<TcpStore>("127.0.0.1", server_->port(), "secret", 5s);
    if (GetParam() == "prefix") return std::make_shared<PrefixStore>("p/", memory_);
    return memory_;
  }

  std::filesystem::path folder_;
  std::shared_ptr<Store> memory_ = std::make_shared<MemoryStore>();
  std::unique_ptr<TcpStoreServer> server_;
};

TEST_P(StoreTest, KeepsByteStrings) {
  auto a = connect(), b = connect();
  std::string bytes("\0\xff\n%/..", 7);
  a->set("odd key/..%\n", bytes);
  EXPECT_EQ(b->get("odd key/..%\n", 1s), bytes);
  a->set("odd key/..%\n", "");
  EXPECT_EQ(b->get("odd key/..%\n", 1s), "");
  a->set(".", "dot");
  EXPECT_EQ(b->get(".", 1s), "dot");
  EXPECT_EQ(b->num_keys(), 2);
  EXPECT_EQ(b->num_keys("odd"), 1);
  EXPECT_EQ(b->num_keys("even"), 0);
  EXPECT_TRUE(b->delete_key("."));
  EXPECT_FALSE(b->delete_key("."));
  EXPECT_EQ(b->num_keys(), 1);
}

TEST_P(StoreTest, CountsAppendsAndCompares) {
  auto s = connect();
  EXPECT_EQ(s->add("n", 5), 5);
  EXPECT_EQ(s->add("n", -7), -2);
  EXPECT_EQ(s->get("n", 1s), "-2");
  EXPECT_EQ(s->append("list", "ab"), 2);
  EXPECT_EQ(s->append("list", "c"), 3);
  EXPECT_EQ(s->get("list", 1s), "abc");
  EXPECT_EQ(s->compare_set("c", "old", "new"), "");
  EXPECT_EQ(s->compare_set("c", "", "first"), "first");
  EXPECT_EQ(s->compare_set("c", "", "second"), "first");
  EXPECT_EQ(s->compare_set("c", "first", "second"), "second");
  EXPECT_THROW(s->add("list", 1), UserError);
  s->add("big", INT64_MAX);
  EXPECT_THROW(s->add("big", 1), UserError);
  EXPECT_EQ(s->add("big", 0), INT64_MAX);
}

TEST_P(StoreTest, SetsAndGetsInBatches) {
  auto s = connect();
  Keys keys, values;
  for (int i = 0; i < 300; ++i) {
    keys.push_back("key" + std::to_string(i));
    values.push_back(std::string(size_t(i * 60), char('a' + i % 26)));  // 2.7 MB: several frames
  }
  s->multi_set(keys, values);
  EXPECT_EQ(s->multi_get(keys, 5s), values);
  EXPECT_TRUE(s->check(keys));
  keys.push_back("other");
  EXPECT_FALSE(s->check(keys));
  EXPECT_TRUE(s->multi_get({}, 1s).empty());
}

TEST_P(StoreTest, WaitsUntilTheLastKeyIsSet) {
  auto waiting = connect(), setting = connect();
  std::atomic<bool> done = false;
  std::thread thread([&] {
    EXPECT_EQ(waiting->multi_get(Keys{"a", "b", "c"}, 10s), (Keys{"1", "2", "3"}));
    done = true;
  });
  setting->set("c", "3");
  setting->set("a", "0");
  setting->delete_key("a");
  setting->set("b", "2");
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(done);
  setting->set("a", "1");
  thread.join();
}

TEST_P(StoreTest, DeadlineNamesTheAbsentKeys) {
  auto s = connect();
  s->set("here", "x");
  auto start = std::chrono::steady_clock::now();
  try {
    s->wait(Keys{"here", "rank1", "rank3"}, 80ms);
    FAIL() << "no timeout";
  } catch (const StoreTimeout& e) {
    std::string text = e.what();
    EXPECT_NE(text.find("2 of 3"), std::string::npos) << text;
    EXPECT_NE(text.find("\"rank1\", \"rank3\""), std::string::npos) << text;
    EXPECT_NE(text.find("80 ms"), std::string::npos) << text;
    EXPECT_EQ(e.keys().size(), 2u);
  }
  auto spent = std::chrono::steady_clock::now() - start;
  EXPECT_GE(spent, 80ms);
  EXPECT_LT(spent, 2s);
  EXPECT_THROW(s->get("none", 0ms), StoreTimeout);
  EXPECT_THROW(s->get("none", -5ms), StoreTimeout);
  EXPECT_EQ(s->get("here", 0ms), "x");  // the store works on after a timeout
}

TEST_P(StoreTest, CountersAreExactUnderContention) {
  constexpr int kThreads = 8, kAdds = 50;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      auto s = connect();
      for (int i = 0; i < kAdds; ++i) s->add("n", 1);
      s->append("who", std::string(1, char('0' + t)));
      s->get("go", 20s);
    });
  auto s = connect();
  while (s->add("n", 0) < kThreads * kAdds) std::this_thread::sleep_for(1ms);
  s->set("go", "");
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(s->get("n", 1s), std::to_string(kThreads * kAdds));
  EXPECT_EQ(s->get("who", 1s).size(), size_t(kThreads));
}

TEST_P(StoreTest, OneObjectServesManyThreads) {
  auto s = connect();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] { EXPECT_EQ(s->get("k" + std::to_string(t), 10s), "v"); });
  for (int t = 0; t < 4; ++t) s->set("k" + std::to_string(t), "v");
  for (auto& thread : threads) thread.join();
}

TEST_P(StoreTest, RefusesWhatDoesNotFit) {
  auto s = connect();
  EXPECT_THROW(s->set("", "x"), UserError);
  EXPECT_THROW(s->set(std::string(kMaxStoreKeyBytes + 1, 'k'), "x"), UserError);
  EXPECT_THROW(s->set("k", std::string(kMaxStoreValueBytes + 1, 'v')), UserError);
  EXPECT_THROW(s->multi_set(Keys{"a", "b"}, Keys{"1"}), UserError);
  s->set("k", std::string(kMaxStoreValueBytes, 'v'));
  EXPECT_EQ(s->get("k", 5s).size(), kMaxStoreValueBytes);
  EXPECT_THROW(s->append("k", "v"), UserError);
}

TEST_P(StoreTest, TellsWhoDiedFirst) {
  auto launcher = connect(), rank = connect();
  EXPECT_TRUE(dead_ranks(*rank, 4).empty());
  std::thread survivor([&] { rank->get(kFailedKey, 10s); });
  announce_departure(*launcher, 3);
  announce_death(*launcher, 2, "signal 9 (Killed)");
  announce_death(*launcher, 0, "exit status 1");
  survivor.join();
  auto dead = dead_ranks(*rank, 4);
  ASSERT_EQ(dead.size(), 2u);
  EXPECT_EQ(dead[0].rank, 2);
  EXPECT_EQ(dead[0].how, "signal 9 (Killed)");
  EXPECT_EQ(dead[1].rank, 0);
  EXPECT_EQ(rank->get(left_key(3), 0ms), "exit status 0");
}

INSTANTIATE_TEST_SUITE_P(Kinds, StoreTest, testing::Values("memory", "file", "tcp", "prefix"),
                         [](const auto& info) { return info.param; });

TEST(PrefixStore, SeesOnlyItsOwnKeys) {
  auto whole = std::make_shared<MemoryStore>();
  PrefixStore one("1/", whole), two("2/", whole);
  one.set("k", "x");
  EXPECT_FALSE(two.check(Keys{"k"}));
  EXPECT_EQ(two.num_keys(), 0);
  EXPECT_EQ(whole->get("1/k", 0ms), "x");
}

TEST(Table, RefusesToGrowWithoutBound) {
  MemoryStore store(std::make_shared<detail::Table>(1000));
  store.set("a", std::string(900, 'x'));
  EXPECT_THROW(store.set("b", std::string(200, 'x')), UserError);
  store.delete_key("a");
  store.set("b", std::string(200, 'x'));
  store.set("b", std::string(900, 'x'));
  EXPECT_EQ(store.num_keys(), 1);
}

}  // namespace
}  // namespace tessera
