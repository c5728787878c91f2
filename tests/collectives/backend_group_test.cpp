// Which thread executes the calls of a group: an engine that only notes it.
#include "collectives/backend_group.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <random>
#include <thread>

#include "core/ops/create.h"

namespace tessera::detail {
namespace {

using std::chrono::milliseconds;

// A call that an engine was asked to run, and where.
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
  void clear() {
    std::lock_guard lock(mutex_);
    list_.clear();
  }
  std::vector<Execution> list() {
    std::lock_guard lock(mutex_);
    return list_;
  }

 private:
  std::mutex mutex_;
  std::vector<Execution> list_;
};

// Is entered by one thread at a time, for one collective after the other.
class NotingEngine final : public Engine {
 public:
  NotingEngine(Log& log, bool leaves, milliseconds takes)
      : log_(log), leaves_(leaves), takes_(takes) {}
  std::string_view name() const override { return "noting"; }
  void run(Call& call) override {
    EXPECT_FALSE(inside_.exchange(true));
    EXPECT_LT(latest_, call.seq());
    latest_ = call.seq();
    log_.add(call);
    std::this_thread::sleep_for(takes_);
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
  const milliseconds takes_;
  std::atomic<bool> inside_{false};
  uint64_t latest_ = 0;
};

class BackendGroupTest : public testing::Test {
 protected:
  Ref<ProcessGroup> make(bool leaves, milliseconds takes = {}) {
    Membership members{.group = "test", .rank = 0, .size = 2, .world_ranks = {0, 1}};
    return Ref<ProcessGroup>(new BackendGroup(std::move(members),
                                              std::make_unique<NotingEngine>(log, leaves, takes),
                                              std::chrono::seconds(60), nullptr));
  }
  const std::thread::id here = std::this_thread::get_id();
  Log log;
  Tensor a = ones({4}), b = ones({4});
};

// Polls, which is no waiting.
bool is_done_within(const Work& work, milliseconds limit) {
  for (auto until = std::chrono::steady_clock::now() + limit;
       !work.done() && std::chrono::steady_clock::now() < until;)
    std::this_thread::sleep_for(milliseconds(1));
  return work.done();
}

// One time of some: a thread that is held up for as long as calls are left to it, or that comes to
// wait just when the communication thread looks by itself, has not shown anything.
TEST_F(BackendGroupTest, WhoWaitsExecutesWhatIsQueuedUpToItsCall) {
  Ref<ProcessGroup> g = make(true);
  std::vector<Execution> seen, expected;
  for (int times = 0; times < 20 && (times == 0 || seen != expected); ++times) {
    g->flush();
    log.clear();
    Ref<Work> first = g->all_reduce_async(a), second = g->all_reduce_async(b),
              third = g->barrier_async();
    second->wait();
    seen = log.list();
    expected = {{first->seq(), here}, {second->seq(), here}};
    EXPECT_TRUE(first->done());
  }
  EXPECT_EQ(seen, expected);
}

TEST_F(BackendGroupTest, CallsThatAreNotLeftRunBesideTheirProgram) {
  Ref<ProcessGroup> g = make(false);
  g->all_reduce_async(a)->wait();
  ASSERT_EQ(log.list().size(), 1u);
  EXPECT_NE(log.list()[0].thread, here);
}

TEST_F(BackendGroupTest, ACallThatNobodyWaitsForIsExecutedAfterAWhile) {
  Ref<ProcessGroup> g = make(true);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(is_done_within(*g->all_reduce_async(a), std::chrono::seconds(10)));
    g->all_reduce_async(b)->wait();
  }
}

// Each is left for as long from when it was queued, not from when it came to stand first.
TEST_F(BackendGroupTest, CallsQueuedTogetherAreExecutedTogether) {
  Ref<ProcessGroup> g = make(true);
  auto best = milliseconds::max();
  for (int i = 0; i < 5 && best > milliseconds(150); ++i) {
    const auto start = std::chrono::steady_clock::now();
    for (int k = 0; k < 20; ++k) g->all_reduce_async(a);
    EXPECT_TRUE(is_done_within(*g->barrier_async(), std::chrono::seconds(10)));
    best = std::min(
        best, std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start));
  }
  EXPECT_LE(best.count(), 150);
}

TEST_F(BackendGroupTest, WhoCannotHelpHurriesTheCommunicationThread) {
  Ref<ProcessGroup> g = make(true);
  Ref<Work> work = g->all_reduce_async(a);
  EXPECT_TRUE(work->wait_for(std::chrono::seconds(10)));
  g->all_reduce_async(b);
  g->flush();
  for (const Execution& e : log.list()) EXPECT_NE(e.thread, here);
}

TEST_F(BackendGroupTest, TwoThreadsThatWaitAreBothServed) {
  Ref<ProcessGroup> g = make(true, milliseconds(2));
  for (int i = 0; i < 50; ++i) {
    Ref<Work> first = g->all_reduce_async(a), second = g->all_reduce_async(b);
    std::thread other([&] { second->wait(); });
    first->wait();
    other.join();
  }
  EXPECT_EQ(log.list().size(), 100u);
}

TEST_F(BackendGroupTest, AMessageTakesTheCallsBeforeItAlong) {
  Ref<ProcessGroup> g = make(true);
  Ref<Work> sum = g->all_reduce_async(a), message = g->send_async(b, 1);
  message->wait();
  EXPECT_TRUE(sum->done());
  ASSERT_EQ(log.list().size(), 2u);
  EXPECT_NE(log.list()[1].thread, here);
}

TEST_F(BackendGroupTest, ThreadsCallAndWaitAsTheyLike) {
  Ref<ProcessGroup> g = make(true);
  auto program = [&](unsigned seed) {
    std::mt19937 random(seed);
    Tensor mine = ones({4});
    std::vector<Ref<Work>> works{g->all_reduce_async(mine)};
    for (int i = 0; i < 500; ++i) {
      Work& one = *works[random() % works.size()];
      switch (random() % 8) {
        case 0: g->all_reduce(mine); break;
        case 1: g->flush(); break;
        case 2: one.wait(); break;
        case 3: one.wait_for(milliseconds(1)); break;
        case 4: works.push_back(g->send_async(mine, 1)); break;
        default: works.push_back(g->all_reduce_async(mine));
      }
    }
    for (const Ref<Work>& work : works) work->wait();
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back(program, seed);
  for (std::thread& thread : threads) thread.join();
}

// At best of some times that a waiter executes the sum. Were a message left as a sum is, it would
// begin when the communication thread looks by itself, 18 ms later.
TEST_F(BackendGroupTest, AMessageBehindACallThatAWaiterExecutesBeginsAtItsEnd) {
  Ref<ProcessGroup> g = make(true, milliseconds(22));
  auto best = milliseconds::max();
  for (int times = 0; times < 100 && best > milliseconds(5); ++times) {
    Ref<Work> sum = g->all_reduce_async(a);
    std::this_thread::sleep_for(milliseconds(2));  // the communication thread has looked
    const size_t before = log.list().size();
    std::thread waiter([&] { sum->wait(); });
    const std::thread::id its = waiter.get_id();
    while (log.list().size() == before && !sum->done()) std::this_thread::yield();
    Ref<Work> message = g->send_async(b, 1);
    waiter.join();
    const auto end = std::chrono::steady_clock::now();
    EXPECT_TRUE(is_done_within(*message, std::chrono::seconds(10)));
    if (log.list().size() < before + 2 || log.list()[before].thread != its) continue;
    best = std::min(
        best, std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - end));
  }
  EXPECT_LE(best.count(), 5);
}

// The communication thread, which the child has not, sleeps meanwhile.
TEST_F(BackendGroupTest, AForkedChildLetsGoOfTheGroup) {
  Ref<ProcessGroup> g = make(false);
  g->all_reduce_async(a)->wait();
  std::this_thread::sleep_for(milliseconds(50));
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    g.reset();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_F(BackendGroupTest, FlushEndsWithASynchronousCallOfAnotherThread) {
  Ref<ProcessGroup> g = make(false, milliseconds(100));
  std::thread other([&] { g->all_reduce(a); });
  while (log.list().size() == 0) std::this_thread::yield();
  g->flush();
  other.join();
}

}  // namespace
}  // namespace tessera::detail
