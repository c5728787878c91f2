// Fault injection: one rank misbehaves at its n-th call of a verb, so that tests see how its peers
// react. A fault happens once, counted over the group and its sub-groups; calls of groups of one
// rank, which have no peers, do not count.
#pragma once
#include <atomic>
#include <optional>

#include "collectives/decorators/decorator.h"

namespace tessera {

struct Fault {
  enum class Action : uint8_t {
    kKill,      // SIGKILL to this process
    kStop,      // SIGSTOP to this process
    kExit,      // _exit(3)
    kThrow,     // throws UserError in the caller
    kDelay,     // sleeps delay_ms before the call
    kMismatch,  // calls a barrier instead (a broadcast of one byte instead of a barrier)
  };
  int rank = 0;                  // of the world
  std::optional<CollKind> kind;  // any, when unset
  int64_t n = 1;                 // first call: 1
  Action action = Action::kKill;
  int64_t delay_ms = 0;
};

/// Parses "rank=1,op=all_reduce,n=20,kill"; actions are kill, stop, exit, throw, mismatch and
/// delay=MS. Throws UserError that names an unknown word.
Fault parse_fault(const std::string& text);

class FaultGroup final : public Decorator {
 public:
  FaultGroup(Ref<ProcessGroup> inner, const Fault& fault)
      : FaultGroup(std::move(inner), std::make_shared<State>(fault)) {}

  Ref<Work> submit(const Collective& c) override;

 protected:
  Ref<ProcessGroup> decorate(Ref<ProcessGroup> group) override {
    return Ref<ProcessGroup>(new FaultGroup(std::move(group), state_));
  }

 private:
  struct State {
    explicit State(const Fault& f) : fault(f) {}
    const Fault fault;
    std::atomic<int64_t> calls{0};
  };
  FaultGroup(Ref<ProcessGroup> inner, std::shared_ptr<State> state)
      : Decorator(std::move(inner)), state_(std::move(state)) {}
  Ref<Work> submit_another(const Collective& c);

  std::shared_ptr<State> state_;
};

}  // namespace tessera
