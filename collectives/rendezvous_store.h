// The store while ranks join a group. A member that has ended meanwhile will not come: whoever
// waits for it is told so, with how it ended, instead of at a deadline. Who has joined may leave,
// though others are still at it. Invariant: only what the launcher announced (store/liveness.h)
// ends a wait early.
#pragma once
#include "collectives/engine.h"
#include "collectives/watchdog.h"

namespace tessera::detail {

/// A wait for members that have not joined; the watchdog keeps its deadline.
class RendezvousWait final : public Watchdog::Wait {
 public:
  /// `absent`: ranks of the group. `dog` may be null, then the wait has no deadline.
  RendezvousWait(const Membership& members, Millis timeout, std::vector<int> absent, Watchdog* dog);
  /// The waiting thread says which ranks of the group are missing now. Throws CommError once the
  /// deadline has passed.
  void check(std::vector<int> absent);

  WaitFacts facts() const override;
  Millis timeout() const override { return timeout_; }
  void fail(const CommError& error) override;

 private:
  const Membership& members_;
  const Millis timeout_;
  mutable std::mutex mutex_;
  std::vector<int> absent_;
  std::optional<CommError> error_;
  const Watchdog::Scope scope_;  // the last, so that the rest is there while it is
};

class RendezvousStore final : public PrefixStore {
 public:
  /// `store` is the job's, where deaths are announced; `prefix` is that of the group's own keys.
  RendezvousStore(Membership members, std::shared_ptr<Store> store, std::string prefix,
                  std::shared_ptr<Watchdog> dog);

  /// As a store's, for keys that end in the number of the rank that sets them; but throw CommError
  /// as soon as a member has ended, or at the deadline.
  std::vector<std::string> multi_get(std::span<const std::string> keys, Millis timeout) override;
  void wait(std::span<const std::string> keys, Millis timeout) override;

  Watchdog* watchdog() const { return dog_.get(); }
  /// Says that this rank needs no member any more in order to join: it may finish from now on.
  void joined();

  /// Throws CommError, which names it, if a member has failed, or has finished before it joined.
  void check_members();
  /// The same after an error that such an end may be behind; the launcher's word may come a moment
  /// later.
  void explain();

  /// How often who waits elsewhere should check.
  static constexpr Millis kLook{200};

 private:
  std::string joined_key(int world_rank) const;

  template <class Call>
  auto in_turns(std::span<const std::string> keys, Millis timeout, Call call);

  const Membership members_;
  const std::string prefix_;
  const std::shared_ptr<Watchdog> dog_;
};

}  // namespace tessera::detail
