// Watches the waits of a group that is connected by messages: such a group cannot tell by itself
// why peers are absent, nor stop waiting for them. Waits are reported to the rank's watchdog.
// Invariant: the first rank that finds the group dead writes a failure to the store, and every rank
// throws that text.
#pragma once
#include <functional>
#include <limits>
#include <optional>

#include "collectives/engine.h"
#include "collectives/watchdog.h"

namespace tessera::detail {

class Watch {
 public:
  Watch(Membership members, std::shared_ptr<Watchdog> dog, std::shared_ptr<Store> store,
        std::string prefix);

  /// One call in progress, for as long as this object lives.
  class Op final : public Watchdog::Wait {
   public:
    /// `end` makes the wait return and may be called repeatedly; `probe` (may be null) does so
    /// where nothing else would. `moved_bytes` (may be null): see Watchdog::Wait. `in_block`: the
    /// call's block (hierarchical.h) keeps the deadline; here only the death of the group ends the
    /// wait.
    Op(Watch& watch, const Call& call, std::function<void(const CommError&)> end,
       std::function<void()> probe = {}, std::function<int64_t()> moved_bytes = {},
       bool in_block = false);
    ~Op();
    /// Says that the call now waits for data of rank `peer` of the group. `all_called`: every rank
    /// has confirmed this call, so that no other rank can be absent.
    void awaits(int peer, bool all_called) {
      awaited_.store(all_called ? ~peer : peer, std::memory_order_relaxed);
    }

    WaitFacts facts() const override;
    Millis timeout() const override { return in_block_ ? Millis(0) : call_.timeout; }
    void fail(const CommError& error) override;
    void probe() override;
    int64_t moved_bytes() const override { return moved_bytes_ ? moved_bytes_() : -1; }
    std::string failure_key() const override { return watch_.failure_key(); }

   private:
    friend class Watch;
    Watch& watch_;
    const Call& call_;
    const std::function<void(const CommError&)> end_;
    const std::function<void()> probe_;
    const std::function<int64_t()> moved_bytes_;
    const bool in_block_;
    const uint64_t number_;
    static constexpr int kNobody = std::numeric_limits<int>::max();
    std::atomic<int> awaited_{kNobody};  // complemented: all have made the call
    std::optional<Watchdog::Scope> scope_;
  };

  /// Returns the error that killed the group, if a rank has written one.
  std::optional<CommError> failure();
  /// Writes `error` unless there is one already, ends all waits, and returns the error that the
  /// group has.
  CommError kill(const CommError& error);
  /// Throws what kill() returns.
  [[noreturn]] void fail_group(const Call& call, const std::string& text, std::vector<int> ranks);
  /// Throws the error for a wait on `peer` that failed with the transport's text `what`.
  [[noreturn]] void explain(const Call& call, int peer, const std::string& what);

 private:
  std::string failure_key() const { return prefix_ + "failure"; }

  const Membership members_;
  const std::shared_ptr<Watchdog> dog_;
  const std::shared_ptr<Store> store_;
  const std::string prefix_;
  std::mutex mutex_;
  std::list<Op*> ops_;
  uint64_t count_ = 0;    // of ops
  uint64_t entered_ = 0;  // last collective
  std::optional<CommError> error_;
};

}  // namespace tessera::detail
