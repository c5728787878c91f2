// What wakes a communication thread that dozes because its rank has no CPU for it beside its
// program. One thread drives two ranks, step by step; without being woken, a dozing thread would
// look again in an hour.
#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>
#include <thread>

#include "collectives/backend_group.h"
#include "collectives/rendezvous.h"
#include "collectives/shm/engine.h"
#include "core/ops/create.h"
#include "tests/collectives/wakeups.h"

namespace tessera::detail {
namespace {

using std::chrono::hours;
using test::is_done;
using test::Rescue;

constexpr int64_t kSmall = 7000;  // elements of a tensor for which no ways are tried

// Gives this thread two CPUs while it lives.
class OnTwoCpus {
 public:
  OnTwoCpus() {
    sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t two;
    CPU_ZERO(&two);
    for (int c = 0; c < CPU_SETSIZE && CPU_COUNT(&two) < 2; ++c)
      if (CPU_ISSET(c, &before_)) CPU_SET(c, &two);
    EXPECT_EQ(sched_setaffinity(0, sizeof two, &two), 0);
  }
  ~OnTwoCpus() { sched_setaffinity(0, sizeof before_, &before_); }
  OnTwoCpus(const OnTwoCpus&) = delete;
  OnTwoCpus& operator=(const OnTwoCpus&) = delete;

 private:
  cpu_set_t before_;
};

// A group of two ranks, both of this thread.
class Pair {
 public:
  Pair() {
    const OnTwoCpus two;
    for (int r : {0, 1}) {
      const Membership members = make_world("pair", r, 2);
      groups_[r] = Ref<ProcessGroup>(new BackendGroup(
          members, std::make_unique<ShmEngine>(members, segment_, ShmOptions{.doze = hours(1)}),
          hours(100), nullptr));
    }
  }
  ProcessGroup& operator[](int r) { return *groups_[r]; }
  /// Ranks must call it from one line.
  Ref<Work> sum(int r, const Tensor& t) { return groups_[r]->all_reduce_async(t); }
  bool dozes(int r) const { return segment_->state(r).sleep == Sleep::kDoze; }
  void await_doze(int r) const {
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!dozes(r) && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(Millis(1));
    EXPECT_TRUE(dozes(r)) << "rank " << r;
  }

 private:
  std::shared_ptr<Segment> segment_ = Segment::make_private(2, {});
  Ref<ProcessGroup> groups_[2];
};

class Dozing : public testing::Test {
 protected:
  // Rank 0 dozes in the first phase of a sum, rank 1, which begins later, in the second.
  void begin_sum(Pair& pair, Tensor (&t)[2], Ref<Work> (&work)[2]) {
    for (int r : {0, 1}) {
      t[r] = full({kSmall}, r + 1.0);
      work[r] = pair.sum(r, t[r]);
      pair.await_doze(r);
    }
    EXPECT_TRUE(pair.dozes(0));
  }
  static void expect_value(const Tensor& t, float value) {
    EXPECT_EQ(t.data<float>()[t.numel() - 1], value);
  }
  Tensor t[2];
  Ref<Work> work[2];
};

TEST_F(Dozing, WhoIsHeldUpWakesItsPeer) {
  for (bool flushes : {false, true}) {
    Pair pair;
    begin_sum(pair, t, work);
    Rescue rescue(pair[0]);
    flushes ? pair[1].flush() : work[1]->wait();
    EXPECT_TRUE(work[1]->done());
    EXPECT_TRUE(is_done(*work[0]));
    for (int r : {0, 1}) expect_value(t[r], 3);
  }
}

// The values that rank 0 sends are the result of a sum, which a send queued behind another message
// needs. It asks for them before rank 1 has begun the sum, which is then urged too, or afterwards.
TEST_F(Dozing, AMessageHurriesWhatItSends) {
  for (bool early : {true, false}) {
    Pair pair, other;
    Rescue rescue(pair[0]), rescue_other(other[0]);
    Tensor got[2] = {zeros({kSmall}), zeros({kSmall})};
    Ref<Work> first = pair[0].recv_async(got[0], 1), sent;
    for (int r : {0, 1}) {
      t[r] = full({kSmall}, r + 1.0);
      work[r] = other.sum(r, t[r]);
      if (r == 0 || !early) other.await_doze(r);
      if (r == (early ? 0 : 1)) sent = pair[0].send_async(t[0], 1);
    }
    EXPECT_TRUE(is_done(*work[0]));
    if (early) {
      EXPECT_TRUE(is_done(*work[1]));
    }
    Ref<Work> second = pair[1].recv_async(got[1], 0), answer = pair[1].send_async(t[1], 0);
    for (const Ref<Work>& message : {first, sent, second, answer}) message->wait();
    for (int r : {0, 1}) expect_value(got[r], 3);
  }
}

// A thread that has waited in vain will ask again; the count of blocked threads is decremented in
// the end.
TEST_F(Dozing, WhoWaitedForATimeIsHeldUp) {
  Pair pair;
  Rescue rescue(pair[0]);
  auto held_up = [](const Ref<Work>& w) { return static_cast<const Call&>(*w).waited_for(); };
  for (int r : {0, 1}) t[r] = full({kSmall}, r + 1.0);
  work[0] = pair.sum(0, t[0]);
  EXPECT_FALSE(held_up(work[0]));
  EXPECT_FALSE(work[0]->wait_for(Millis(1)));
  EXPECT_TRUE(held_up(work[0]));
  work[1] = pair.sum(1, t[1]);
  for (int r : {0, 1}) work[r]->wait();
  EXPECT_FALSE(held_up(work[0]));
}

// Rank 0's send is queued behind a sum for whose end it dozes. Rank 1, which ends the sum, is not
// blocked by it, but by the message.
TEST_F(Dozing, AMessageWakesWhoDozesBeforeIt) {
  Pair pair;
  Rescue rescue(pair[0]);
  Tensor message[2] = {full({4}, 5.0), full({4}, 6.0)};
  for (int r : {1, 0}) {
    t[r] = full({kSmall}, r + 1.0);
    work[r] = pair.sum(r, t[r]);
    pair.await_doze(r);
  }
  Ref<Work> sent = pair[0].send_async(message[0], 1);
  EXPECT_TRUE(pair.dozes(0) && pair.dozes(1));
  Ref<Work> got = pair[1].recv_async(message[1], 0);
  EXPECT_TRUE(is_done(*got) && is_done(*sent));
  expect_value(message[1], 5);
  for (int r : {0, 1}) expect_value(t[r], 3);
}

// No thread is blocked; each rank looks when its program submits another call.
TEST_F(Dozing, WhoDozesLooksWhenACallIsQueued) {
  Pair pair;
  begin_sum(pair, t, work);
  Rescue rescue(pair[0]);
  Tensor next[2] = {full({kSmall}, 2.0), full({kSmall}, 3.0)};
  Ref<Work> last[2];
  for (int r : {0, 1}) {
    last[r] = pair.sum(r, next[r]);
    EXPECT_TRUE(is_done(*work[r])) << "rank " << r;
  }
  for (int r : {0, 1}) {
    last[r]->wait();
    expect_value(t[r], 3);
    expect_value(next[r], 5);
  }
}

}  // namespace
}  // namespace tessera::detail
