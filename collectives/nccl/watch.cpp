// The thread of a group of cards that watches its calls.
#include <algorithm>

#include "collectives/nccl/core.h"
#include "collectives/nccl/ended.h"
#include "collectives/thread.h"

namespace tessera::nccl {

using detail::WaitFacts;
using detail::Watchdog;

namespace {

constexpr Millis kLook{20};             // between two looks at events
constexpr Millis kMostPutOff{20};       // a peer may wait for a message that is put off
constexpr Millis kSuspicious{300};      // a call that takes longer is compared with the peers'
constexpr uint64_t kCompareEvery = 32;  // collectives, where none is late
constexpr size_t kPublished = 64;       // of them, then

}  // namespace

WaitFacts GroupCore::facts_of(const CardCall& call) const {
  WaitFacts f;
  f.group = members_.group, f.members = members_.world_ranks;
  f.call = call.title(), f.site = detail::describe(call.site);
  f.number = f.seq = call.seq();
  f.holds_up = true;
  if (!call.plan.is_p2p()) return f;
  f.kind = WaitFacts::Kind::kMessages;
  f.peer = members_.world_ranks[size_t(call.plan.record.peer)];
  f.takes = call.plan.takes;
  f.entered = UINT64_MAX;  // a peer that waits in a collective has perhaps made its part
  return f;
}

void GroupCore::start_watching() {
  if (!thread_.joinable()) thread_ = detail::start_thread("tessera-nccl", [this] { watch(); });
}

void GroupCore::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (dead()) {
      for (Lane& lane : lanes_) lane.underway.clear();
      idle_.notify_all();
      lock.unlock();
      unwatch();
      lock.lock();
      if (!stop_) changed_.wait(lock);
      continue;
    }
    if (const auto error = requested()) {
      lock.unlock();
      unwatch();
      lock.lock();
      die(*error);
      continue;
    }
    if (idle())
      changed_.wait(lock);
    else
      changed_.wait_for(lock, kLook);
    if (stop_ || dead()) continue;
    drop_ended();
    // Collectives of a scope are submitted where all ranks do: NCCL chooses how it moves those of a
    // group by the group.
    const auto message = std::ranges::find(put_off_, false, &Ready::together);
    if (message != put_off_.end() && Clock::now() - message->called > kMostPutOff) {
      try {
        submit_all_put_off(/*of_scopes=*/false);
      } catch (const CommError&) {  // whoever waits for them hears of it
      }
    }
    look_for_errors();
    lock.unlock();
    for (Lane& lane : lanes_) watch_head(lane);
    compare_calls();
    lock.lock();
  }
}

void GroupCore::drop_ended() {
  for (Lane& lane : lanes_)
    while (!lane.underway.empty() && lane.underway.front().call->done()) {
      lane.underway.front().call->see_end();
      lane.underway.pop_front();
    }
  if (idle()) idle_.notify_all();
}

// A call waits for peers from when the card has come to it.
void GroupCore::watch_head(Lane& lane) {
  Ref<CardCall> head;
  {
    std::lock_guard lock(mutex_);
    if (!dead() && !lane.underway.empty()) head = lane.underway.front().call;
  }
  if (head && !head->begun()) head = nullptr;
  if (head == lane.head) return;
  lane.scope.reset(), lane.wait.reset();
  lane.head = head;
  if (!head) return;
  lane.since = Clock::now();
  lane.wait.emplace(facts_of(*head), head->limit, key("failure"),
                    [this](const CommError& e) { request_failure(e); });
  lane.scope.emplace(context_.watchdog.get(), *lane.wait, lane.since);
}

void GroupCore::unwatch() {
  for (Lane& lane : lanes_) lane.scope.reset(), lane.head = nullptr;
}

// What NCCL found by itself: a connection that broke, most likely because a rank has ended.
void GroupCore::look_for_errors() {
  if (dead()) return;
  const auto broken = std::ranges::find_if(
      lanes_, [](const Lane& l) { return l.comm->error() != Result::kSuccess; });
  if (broken == lanes_.end()) return;
  const Result state = broken->comm->error();
  const std::string call = broken->underway.empty()
                               ? members_.group
                               : broken->underway.front().call->title() + " on " + members_.group;
  die(nccl_failure(
      fmt::format("{}: NCCL on rank {}: {}", call, members_.rank, functions()->error_string(state)),
      members_, *context_.store, collectives_,
      "; look at the output of the other ranks, and at the network (NCCL_DEBUG=WARN says more)",
      {}));
}

// Shows this rank's latest calls to the others, and looks at theirs.
void GroupCore::compare_calls() {
  const auto now = Clock::now();
  const bool late = lanes_[0].head && now - lanes_[0].since > kSuspicious;
  const uint64_t latest = journal_.latest();
  if (dead() || (!late && latest < published_ + kCompareEvery)) return;
  if (late && now - compared_at_ < kSuspicious) return;
  compared_at_ = now;
  const StoreTimeLimit limit(Watchdog::kResponseTime);
  try {
    published_ = latest;
    context_.store->set(key(fmt::format("calls/{}", members_.rank)),
                        encode(journal_.entries(late ? Journal::kEntries : kPublished)));
    std::vector<std::vector<JournalEntry>> journals;
    for (int r = 0; r < members_.size; ++r) {
      const std::string name = key(fmt::format("calls/{}", r));
      if (!context_.store->check({&name, 1})) return;
      journals.push_back(decode_journal(context_.store->get(name, Millis(0))));
    }
    std::vector<int> blame;
    const std::string text = compare_journals(journals, members_.group, blame);
    if (!text.empty()) request_failure(CommError(text, members_.group, latest, blame));
  } catch (const tessera::Error&) {  // the store does not answer; the deadline stands
  }
}

void GroupCore::close() {
  {
    std::unique_lock lock(mutex_);
    try {
      if (!dead()) submit_all_put_off();
    } catch (const CommError&) {  // it is dead now
    }
    changed_.notify_all();
    // After a failure of another group, whose ranks may end, work of this one may have no end.
    for (const auto since = Clock::now(); thread_.joinable() && !dead() && !idle();) {
      idle_.wait_for(lock, kLook);
      const std::optional<CommError> failed = context_.watchdog->failure();
      if (failed && Clock::now() - since > kSuspicious) die(*failed);
    }
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  unwatch();
  std::lock_guard lock(mutex_);
  for (Lane& lane : lanes_) lane.underway.clear();
  if (!graphs_) close_communicators();
}

}  // namespace tessera::nccl
