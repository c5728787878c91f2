// The store while ranks join a group. A member that has ended meanwhile will not come: whoever
// waits for it is told so, with how it ended, instead of at a deadline. Who has joined may leave,
// though others are still at it. Invariant: only what the launcher announced (store/liveness.h)
// ends a wait early.
#pragma once
#include "collectives/engine.h"
#include "collectives/store/store.h"

namespace tessera::detail {

class JoiningStore final : public PrefixStore {
 public:
  /// `store` is the job's, where deaths are announced; `prefix` is that of the group's own keys.
  JoiningStore(Membership members, std::shared_ptr<Store> store, std::string prefix);

  /// As a store's, but throw CommError as soon as a member has ended.
  std::vector<std::string> multi_get(std::span<const std::string> keys, Millis timeout) override;
  void wait(std::span<const std::string> keys, Millis timeout) override;

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

  const Membership members_;
  const std::string prefix_;
};

}  // namespace tessera::detail
