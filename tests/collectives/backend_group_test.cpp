// Which thread executes the calls of a group, with an engine that only records it. Where time must
// not make a call begin, calls are left to waiters for an hour.
#include "collectives/backend_group.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <mutex>
#include <random>
#include <thread>

#include "core/ops/create.h"
#include "tests/collectives/wakeups.h"

namespace tessera::detail {
namespace {

using std::chrono::milliseconds;
using test::is_done;
using test::Rescue;

constexpr auto kAnHour = std::chrono::hours(1);

// A call that the engine was asked to run, and the thread that asked.
struct Execution {
  uint64_t call;
  std::thread::id thread;
  bool operator==(const Execution&) const = default;
};

class Log {
 public:
  void add(const Call& call) {
    std::lock_guard lock(mutex_);
    list_.push_back({call.seq(), std::this_thread::get_id()});
  }
  std::vector<Execution> list() {
    std::lock_guard lock(mutex_);
    return list_;
  }

 private:
  std::mutex mutex_;
  std::vector<Execution> list_;
};

// An engine that one thread at a time enters, for one collective after the other. It calls
// `inside`.
class NotingEngine final : public Engine {
 public:
  NotingEngine(Log& log, bool leaves, std::function<void()> inside)
      : log_(log), leaves_(leaves), in_call_(std::move(inside)) {}
  std::string_view name() const override { return "noting"; }
  void run(Call& call) override {
    EXPECT_FALSE(inside_.exchange(true));
    EXPECT_LT(latest_, call.seq());
    latest_ = call.seq();
    log_.add(call);
    if (in_call_) in_call_();
    inside_ = false;
  }
  void run_p2p(const Ref<Call>& first, FunctionRef<Ref<Call>()> next) override {
    EXPECT_FALSE(inside_.exchange(true));
    for (Ref<Call> call = first; call; call = next()) {
      log_.add(*call);
      call->finish(nullptr);
    }
    inside_ = false;
  }
  void abort(const CommError&) override {}
  bool leaves_to_waiters(const Call&) const override { return leaves_; }

 private:
  Log& log_;
  const bool leaves_;
  const std::function<void()> in_call_;
  std::atomic<bool> inside_{false};
  uint64_t latest_ = 0;
};

class BackendGroupTest : public testing::Test {
 protected:
  Ref<ProcessGroup> make(bool leaves, Millis leave, std::function<void()> inside = nullptr) {
    Membership members{.group = "test", .rank = 0, .size = 2, .world_ranks = {0, 1}};
    auto engine = std::make_unique<NotingEngine>(log, leaves, std::move(inside));
    return Ref<ProcessGroup>(new BackendGroup(std::move(members), std::move(engine),
                                              std::chrono::seconds(60), nullptr, nullptr, leave));
  }
  // Waits until the communication thread has looked at the queue and found nothing that it should
  // execute.
  void await_rest() {
    for (pid_t thread : test::threads_called("tessera-comm")) test::await_sleep(thread);
  }
  const std::thread::id here = std::this_thread::get_id();
  Log log;
  Tensor a = ones({4}), b = ones({4});
};

TEST_F(BackendGroupTest, WhoWaitsExecutesWhatIsQueuedUpToItsCall) {
  Ref<ProcessGroup> g = make(true, kAnHour);
  Rescue rescue(*g);
  Ref<Work> first = g->all_reduce_async(a), second = g->all_reduce_async(b),
            third = g->barrier_async();
  await_rest();
  second->wait();
  EXPECT_EQ(log.list(), (std::vector<Execution>{{first->seq(), here}, {second->seq(), here}}));
  EXPECT_TRUE(first->done());
  EXPECT_FALSE(third->done());
}

TEST_F(BackendGroupTest, CallsThatAreNotLeftRunBesideTheirProgram) {
  Ref<ProcessGroup> g = make(false, kAnHour);
  Rescue rescue(*g);
  g->all_reduce_async(a)->wait();
  ASSERT_EQ(log.list().size(), 1u);
  EXPECT_NE(log.list()[0].thread, here);
}

TEST_F(BackendGroupTest, ACallThatNobodyWaitsForIsExecutedAfterAWhile) {
  Ref<ProcessGroup> g = make(true, BackendGroup::kLeave);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(is_done(*g->all_reduce_async(a)));
    g->all_reduce_async(b)->wait();
  }
}

// Each is left to waiters from when it was queued, not from when it became the first: that would
// take 200 s.
TEST_F(BackendGroupTest, CallsQueuedTogetherAreExecutedTogether) {
  Ref<ProcessGroup> g = make(true, milliseconds(100));
  for (int k = 0; k < 2000; ++k) g->all_reduce_async(a);
  EXPECT_TRUE(is_done(*g->barrier_async()));
}

TEST_F(BackendGroupTest, WhoCannotHelpHurriesTheCommunicationThread) {
  Ref<ProcessGroup> g = make(true, kAnHour);
  Rescue rescue(*g);
  Ref<Work> work = g->all_reduce_async(a);
  await_rest();
  EXPECT_TRUE(work->wait_for(std::chrono::minutes(1)));
  g->all_reduce_async(b);
  await_rest();
  g->flush();
  ASSERT_EQ(log.list().size(), 2u);
  for (const Execution& e : log.list()) EXPECT_NE(e.thread, here);
}

TEST_F(BackendGroupTest, TwoThreadsThatWaitAreBothServed) {
  Ref<ProcessGroup> g = make(true, kAnHour, [] { std::this_thread::sleep_for(milliseconds(2)); });
  Rescue rescue(*g);
  std::vector<uint64_t> made, executed;
  for (int i = 0; i < 50; ++i) {
    Ref<Work> first = g->all_reduce_async(a), second = g->all_reduce_async(b);
    std::thread other([&] { EXPECT_NO_THROW(second->wait()); });
    EXPECT_NO_THROW(first->wait());
    other.join();
    EXPECT_TRUE(first->done() && second->done()) << "round " << i;
    made.insert(made.end(), {first->seq(), second->seq()});
  }
  for (const Execution& e : log.list()) executed.push_back(e.call);
  EXPECT_EQ(executed, made);
}

TEST_F(BackendGroupTest, AMessageTakesTheCallsBeforeItAlong) {
  Ref<ProcessGroup> g = make(true, kAnHour);
  Rescue rescue(*g);
  Ref<Work> sum = g->all_reduce_async(a), message = g->send_async(b, 1);
  message->wait();
  EXPECT_TRUE(sum->done());
  ASSERT_EQ(log.list().size(), 2u);
  EXPECT_NE(log.list()[1].thread, here);
}

TEST_F(BackendGroupTest, ThreadsCallAndWaitAsTheyLike) {
  Ref<ProcessGroup> g = make(true, kAnHour);
  Rescue rescue(*g);
  std::atomic<size_t> made{0};
  auto program = [&](unsigned seed) {
    std::mt19937 random(seed);
    Tensor mine = ones({4});
    std::vector<Ref<Work>> works{g->all_reduce_async(mine)};
    ++made;
    for (int i = 0; i < 500; ++i) {
      Work& one = *works[random() % works.size()];
      switch (random() % 8) {
        case 0: g->all_reduce(mine), ++made; break;
        case 1: g->flush(); break;
        case 2: one.wait(); break;
        case 3: one.wait_for(milliseconds(1)); break;
        case 4: works.push_back(g->send_async(mine, 1)), ++made; break;
        default: works.push_back(g->all_reduce_async(mine)), ++made;
      }
    }
    for (const Ref<Work>& work : works) {
      work->wait();
      EXPECT_TRUE(work->done());
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed)
    threads.emplace_back([&, seed] { EXPECT_NO_THROW(program(seed)); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(log.list().size(), made);
}

// If a message was left to waiters as a sum is, it would begin in an hour.
TEST_F(BackendGroupTest, AMessageBehindACallThatAWaiterExecutesBeginsAtItsEnd) {
  std::latch entered(1), leave(1);
  Ref<ProcessGroup> g = make(true, kAnHour, [&] {
    entered.count_down();
    leave.wait();
  });
  Rescue rescue(*g);
  Ref<Work> sum = g->all_reduce_async(a);
  await_rest();
  std::thread waiter([&] { EXPECT_NO_THROW(sum->wait()); });
  const std::thread::id its = waiter.get_id();
  entered.wait();
  Ref<Work> message = g->send_async(b, 1);
  await_rest();
  EXPECT_FALSE(message->done());
  leave.count_down();
  waiter.join();
  EXPECT_TRUE(is_done(*message));
  ASSERT_EQ(log.list().size(), 2u);
  EXPECT_EQ(log.list()[0].thread, its);
  EXPECT_NE(log.list()[1].thread, its);
}

// The communication thread, which the child does not have, sleeps meanwhile.
TEST_F(BackendGroupTest, AForkedChildLetsGoOfTheGroup) {
  Ref<ProcessGroup> g = make(false, kAnHour);
  g->all_reduce_async(a)->wait();
  await_rest();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    g.reset();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_F(BackendGroupTest, FlushEndsWithASynchronousCallOfAnotherThread) {
  std::latch entered(1), leave(1);
  std::atomic<pid_t> flushes{0};
  std::atomic<bool> called{false};
  Ref<ProcessGroup> g = make(false, kAnHour, [&] {
    entered.count_down();
    leave.wait();
    called = true;
  });
  Rescue rescue(*g);
  std::thread other([&] { g->all_reduce(a); });
  entered.wait();
  std::thread flusher([&] {
    flushes = gettid();
    EXPECT_NO_THROW(g->flush());
    EXPECT_TRUE(called);
  });
  while (flushes == 0) std::this_thread::yield();
  EXPECT_TRUE(test::await_sleep(flushes));
  leave.count_down();
  other.join();
  flusher.join();
}

}  // namespace
}  // namespace tessera::detail
