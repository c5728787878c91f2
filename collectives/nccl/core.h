// What a group of cards consists of, for as long as calls refer to it: the communicator, calls that
// are under way, the failure, and the thread that watches. Invariant: `mutex_` is held by whoever
// uses the communicator; the watchdog, which has a lock of its own, only takes `failure_mutex_`.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <set>
#include <span>
#include <thread>
#include <utility>

#include "collectives/nccl/call.h"
#include "collectives/nccl/group.h"
#include "collectives/nccl/journal.h"
#include "collectives/nccl/memory.h"
#include "core/backend/cuda/refusals.h"
#include "core/dispatch/device_span.h"

namespace tessera::nccl {

/// A wait of this rank for its peers, for the watchdog.
class PeerWait final : public detail::Watchdog::Wait {
 public:
  using Fail = std::function<void(const CommError&)>;
  PeerWait(detail::WaitFacts facts, Millis timeout, std::string failure_key, Fail fail)
      : facts_(std::move(facts)),
        timeout_(timeout),
        failure_key_(std::move(failure_key)),
        fail_(std::move(fail)) {}
  detail::WaitFacts facts() const override { return facts_; }
  Millis timeout() const override { return timeout_; }
  void fail(const CommError& error) override { fail_(error); }
  std::string failure_key() const override { return failure_key_; }

 private:
  const detail::WaitFacts facts_;
  const Millis timeout_;
  const std::string failure_key_;
  const Fail fail_;
};

class CapturedCalls;

class GroupCore final : public CallOwner {
 public:
  using Clock = std::chrono::steady_clock;
  GroupCore(detail::Membership members, GroupContext context, Device device,
            Communicators communicators);
  ~GroupCore() override;
  /// Waits for the work and ends the communicators. Where graphs use them, they end once the graphs
  /// are destroyed and nobody refers to a call. No call may be submitted after it, and no graph
  /// launched.
  void close();

  /// Where the calling thread captures, the call becomes a part of the graph.
  Ref<Work> submit(const Collective& c);
  Communicators split(int color, int key);
  void abort(const std::string& why);
  void flush();
  Device device() const { return device_; }
  /// As CardGroup::allocate.
  Ref<Storage> allocate(size_t bytes, detail::CardGroup::OnAll on_all);

  void submit_put_off() override;
  std::exception_ptr failure() const override;
  [[noreturn]] void throw_failure() override;

 private:
  /// A call that is under way, and the thread that hears of its failure.
  struct Underway {
    Ref<CardCall> call;
    Ref<cuda::Refusals> thread;
  };
  /// Calls to be submitted together, with what is to follow each on the stream.
  struct Ready {
    Ref<CardCall> call;
    std::function<void()> after;
    // Kept until it is submitted: memory that is freed before would be reused at once, and whoever
    // reuses it waits for the call.
    Tensors tensors;
    Clock::time_point called;
    std::vector<Ref<Storage>> memory = {};  // for pieces that are brought together
    bool together = false;                  // put off by a TogetherScope
    // Where the caller records a profile.
    AddDeviceTimes add_to_profile = nullptr;
    ProfileEvent event = {};
  };
  /// A communicator, what is under way on it, and the first of that, if the card has come to it.
  struct Lane {
    std::unique_ptr<Communicator> comm;
    std::deque<Underway> underway;
    // Only the watching thread uses these.
    Ref<CardCall> head = nullptr;
    Clock::time_point since{};
    std::optional<PeerWait> wait{};
    std::optional<detail::Watchdog::Scope> scope{};
  };
  Lane& lane_of(const detail::Plan& plan);
  ProfileEvent event_of(const detail::Plan& plan, const CallSite& site);
  void add_to_profile(std::span<const Ready> calls, const Ref<Event>& begun,
                      const Ref<Event>& ended);
  bool idle() const;
  bool dead() const { return dead_.load(std::memory_order_acquire); }
  Ready prepare(const Ref<CardCall>& call, const Collective& c, const Stream& stream);
  void submit_now(Lane& lane, std::vector<Ready> calls);
  void submit_to_nccl(Lane& lane, std::span<const Ready> calls, const Stream& stream);
  /// Without `of_scopes`, messages alone.
  void submit_all_put_off(bool of_scopes = true);
  void with_nccl(const std::string& title, detail::WaitFacts facts, Millis limit,
                 const std::function<void(const Communicator::Pause&)>& body);
  detail::WaitFacts facts_of(const CardCall& call) const;
  std::string key(const std::string& what) const {
    return context_.prefix + "cards/" + members_.group + "/" + what;
  }
  void request_failure(const CommError& error);
  std::optional<CommError> requested() const;
  void die(CommError error);
  void close_communicators();

  // Graphs that have calls of the group (captured.cpp).
  friend class CapturedCalls;
  Ref<Work> capture(const Collective& c);

  // Memory of the group's own (memory.cpp).
  friend class OwnMemory;
  bool take_memory(OwnBlock& block);
  void drop(OwnBlock block);
  void free_dropped();
  void free(const OwnBlock& block);

  void start_watching();

  // The rest runs on the thread that watches.
  void watch();
  void drop_ended();
  void watch_head(Lane& lane);
  void unwatch();
  void look_for_errors();
  void compare_calls();

  const detail::Membership members_;
  const GroupContext context_;
  const Device device_;

  std::mutex mutex_;
  std::condition_variable changed_, idle_;
  std::array<Lane, 3> lanes_;  // as Communicators
  uint64_t collectives_ = 0, messages_ = 0;
  std::vector<Ready> put_off_;
  std::mutex dropped_mutex_;       // taken last
  std::vector<OwnBlock> dropped_;  // whose storages have ended
  int graphs_ = 0;                 // that have calls of the group and were not destroyed
  bool stop_ = false;
  std::thread thread_;
  Journal journal_;

  mutable std::mutex failure_mutex_;
  std::atomic<bool> dead_{false};
  std::exception_ptr failure_;
  std::optional<CommError> requested_;

  // Only the watching thread uses these.
  Clock::time_point compared_at_;
  uint64_t published_ = 0;
};

}  // namespace tessera::nccl
