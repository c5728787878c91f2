// What a carrier of messages cannot do for a waiting rank: tell why its peers do not come, and stop
// waiting. A thread looks at calls that have been under way for a while, tells the store what this
// rank waits for, reads what the others wait for, and ends the wait when the group or a rank of it
// is dead, when two ranks wait for each other, or at the deadline. Invariant: the first rank to
// find the group dead leaves an obituary in the store, and every rank throws that text.
#pragma once
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <thread>

#include "collectives/engine.h"
#include "collectives/store/store.h"

namespace tessera::detail {

class Watch {
 public:
  /// What a rank waits for: messages, for which the watch keeps the call's deadline, or its block
  /// (blocks.h), which keeps it itself and knows who is absent.
  enum class For : uint8_t { kMessages, kBlock };
  using Cancel = std::function<void(const CommError&)>;
  /// One call under way. `cancel` makes its wait return; `probe` (may be null) ends it where
  /// nothing else would. Both are called with the lock held, maybe repeatedly, `probe` for calls
  /// that have been under way for a while.
  struct Op {
    const Call* call = nullptr;
    For waits_for = For::kMessages;
    Cancel cancel;
    std::function<void()> probe;
    std::chrono::steady_clock::time_point since;
    uint64_t number = 0;
    std::string suspicion;  // what looked like a deadlock when last looked at
    int suspected = 0;      // and how often in a row
  };
  using Handle = std::list<Op>::iterator;
  /// A rank that waits for another which waits for a third is to learn from that one who is absent.
  /// So the further what it waits for is from where a call begins, the longer it waits beyond the
  /// deadline: by one of these for each step.
  static constexpr Millis kGrace{500};

  Watch(Membership members, std::shared_ptr<Store> store, std::string prefix);
  ~Watch();

  Handle begin(const Call& call, Cancel cancel, std::function<void()> probe = {},
               For waits_for = For::kMessages);
  void end(Handle op);
  /// The error that killed the group, if any rank has left one.
  std::optional<CommError> obituary();
  /// Leaves `error` unless there is one already, ends all waits, and returns what holds.
  CommError kill(const CommError& error);
  /// kill(), thrown.
  [[noreturn]] void die(const Call& call, const std::string& text, std::vector<int> ranks);
  /// Throws for a wait on `peer` that failed with the carrier's text `what`.
  [[noreturn]] void explain(const Call& call, int peer, const std::string& what);

 private:
  void serve();
  void look(Op& op);
  void tell(const std::string& status);
  void forget_status();
  std::string status_of(const Op& op) const;
  std::vector<std::string> statuses();
  std::string deadlock_with(const Op& op, const std::string& theirs) const;
  void check_deaths(const Op& op);
  CommError gone(const Call& call, int peer, const std::string& how) const;
  void check_deadline(const Op& op, const std::vector<std::string>& statuses);

  const Membership members_;
  const std::shared_ptr<Store> store_;
  const std::string prefix_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Op> ops_;
  uint64_t count_ = 0;
  uint64_t entered_ = 0;  // last collective
  std::string told_;
  std::optional<CommError> error_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tessera::detail
