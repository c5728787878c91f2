// One call on a group of cards. The host learns of its end where it waits for values, and kernels'
// streams wait for its event. Sends and receives may be submitted a while after they were called,
// so that they proceed together. Invariant: nobody takes results of a call that was aborted: wait()
// throws what killed the group unless the end had been seen before.
#pragma once
#include "collectives/plan.h"

namespace tessera::nccl {

namespace detail = ::tessera::detail;

/// What submits calls, for a call that has to be submitted now.
class CallOwner : public RefCounted {
 public:
  /// Submits what is put off; throws what killed the group.
  virtual void submit_put_off() = 0;
  /// What killed the group; null: nothing.
  virtual std::exception_ptr failure() const = 0;
  /// Throws what killed the group, which the calling thread need not hear from the card too.
  [[noreturn]] virtual void throw_failure() = 0;
};

class CardCall final : public Work {
 public:
  CardCall(Ref<CallOwner> owner, CallSite site, Millis limit, bool async)
      : site(site), limit(limit), async(async), owner_(std::move(owner)) {}

  bool done() const override { return submitted() ? ended_->done() : bool(owner_->failure()); }
  void wait() override;
  bool wait_for(Millis timeout) override;
  void wait_on(const Stream& stream) override;
  void hurry() override;
  std::exception_ptr error() const override;
  uint64_t seq() const override { return plan.record.seq; }
  double elapsed_ms() const override;

  bool submitted() const { return submitted_.load(std::memory_order_acquire); }
  /// Whether the card has come to the call: nothing that was enqueued before holds it up.
  bool begun() const { return submitted() && begun_->done(); }
  /// It is between these events.
  void set_submitted(Ref<Event> begun, Ref<Event> ended, bool timed);
  /// Notes that the end was seen, where nothing had killed the group before.
  void see_end();

  detail::Plan plan;
  const CallSite site;
  const Millis limit;
  const bool async;
  /// How many calls of a captured graph it stands for, of which `plan` describes the first; 0:
  /// none.
  size_t captured = 0;
  /// "all_reduce #7", "all_reduce #7, the first of 12 in a captured graph".
  std::string title() const;

 private:
  const Ref<CallOwner> owner_;
  std::atomic<bool> submitted_{false}, ended_well_{false};
  Ref<Event> begun_, ended_;  // set before submitted_
  bool timed_ = false;
};

}  // namespace tessera::nccl
