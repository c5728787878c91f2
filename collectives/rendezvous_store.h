// The store while ranks join a group. A member that has ended will not come: a rank that waits for
// it is told so, and how it ended, before the deadline. A rank that has joined may end while others
// are still joining. Invariant: only what the launcher announced (store/liveness.h) ends a wait
// early.
#pragma once
#include "collectives/engine.h"
#include "collectives/watchdog.h"

namespace tessera::detail {

/// A wait for members that have not joined yet; the watchdog keeps its deadline.
class RendezvousWait final : public Watchdog::Wait {
 public:
  /// `absent`: ranks of the group. `dog` may be null; the wait then has no deadline.
  RendezvousWait(const Membership& members, Millis timeout, std::vector<int> absent, Watchdog* dog);
  /// Called by the waiting thread with the ranks of the group that are missing now. Throws
  /// CommError once the deadline has passed.
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
  const Watchdog::Scope scope_;  // last, so that the other members exist while it does
};

class RendezvousStore final : public PrefixStore {
 public:
  /// `store` is the job's, where deaths are announced; `prefix` is the prefix of the group's own
  /// keys.
  RendezvousStore(Membership members, std::shared_ptr<Store> store, std::string prefix,
                  std::shared_ptr<Watchdog> dog);

  /// These are the calls of a store for keys that end in the number of the rank that sets them, but
  /// throw CommError as soon as a member has ended, or at the deadline.
  std::vector<std::string> multi_get(std::span<const std::string> keys, Millis timeout) override;
  void wait(std::span<const std::string> keys, Millis timeout) override;

  Watchdog* watchdog() const { return dog_.get(); }
  /// Says that this rank needs no other member in order to join: it may end from now on.
  void joined();

  /// Throws CommError that names a member which has failed, or has finished before it joined.
  void check_members();
  /// Does the same after an error that the end of a member may have caused; waits a moment for the
  /// launcher's announcement.
  void explain();

  /// How often a thread that waits for something else should check the members.
  static constexpr Millis kCheckInterval{200};

 private:
  std::string joined_key(int world_rank) const;

  template <class Call>
  auto in_turns(std::span<const std::string> keys, Millis timeout, Call call);

  const Membership members_;
  const std::string prefix_;
  const std::shared_ptr<Watchdog> dog_;
};

}  // namespace tessera::detail
