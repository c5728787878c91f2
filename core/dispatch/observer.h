// What a thread does besides running ops (it reads a value, sets a gradient), told to an observer
// that records the ops. An event is a value: the code that does the thing calls notify(), and the
// thread's observer, if it has one, gets the event before the thing happens. Invariant: references
// in an event are valid until notify() returns; an observer that keeps one keeps the owner too.
#pragma once
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "core/base/function_ref.h"
#include "core/tensor/tensor.h"

namespace tessera {
namespace events {

/// The thread is about to do something that is no op and that a replay of the ops would leave out:
/// talk to other ranks through a group, add a hook, change a module. Sent by the verbs of a process
/// group, nn::Module and the hooks of gradients. An observer whose backend defers ops runs them
/// before it returns; one that cannot go on throws UserError. `what` makes the text that names the
/// action and its place in the program; it is called only where that text is needed.
struct LeavesOps {
  FunctionRef<std::string()> what;
};

/// The value of a tensor is about to be read on the host: sent by Tensor::item, `where` is the
/// place of that call. What the program does next may depend on the value, so an observer has
/// deferred ops run before it returns.
struct ValueRead {
  std::source_location where;
};

/// `slot`, a handle that outlives the ops, is read: the gradient of a leaf, by Tensor::grad.
/// `owner` keeps the slot alive. The ops that follow depend on the tensor that is in the slot.
struct SlotRead {
  const RefCounted& owner;
  const Tensor& slot;
};
/// `slot` is about to be set to `now`, or cleared where that is undefined: sent by Tensor::set_grad
/// and by backward. A replay leaves in the slot what the recorded run left there.
struct SlotChange {
  const RefCounted& owner;
  Tensor& slot;
  const Tensor& now;
};

/// Which ops come next depends on `value`, a number that outlives them and that `owner` keeps
/// alive: sent by TrackedSetting (tracked_setting.h) and where the hooks of a gradient run. Ops
/// recorded under one value are not replayed under another.
struct SettingRead {
  const RefCounted& owner;
  const int64_t& value;
};
/// `value` is about to change. A replay sets it to what the recorded run left.
struct SettingChange {
  const RefCounted& owner;
  int64_t& value;
};

/// An op is called on these handles, or the program asks whether one requires a gradient: sent by
/// dispatch() before any layer sees the op, and by Tensor::requires_grad. What comes next depends
/// on the history and the placement that the handles carry. Some handles may be undefined.
struct HandlesRead {
  std::span<const Tensor> handles;
};

/// The forward or the vjp of the custom function `name` begins, or ends. An observer that refuses
/// something in between, such as a read of values, can name the function.
struct CustomFunctionRuns {
  std::string_view name;
  bool begins;
};

}  // namespace events

using HostEvent = std::variant<events::LeavesOps, events::ValueRead, events::SlotRead,
                               events::SlotChange, events::SettingRead, events::SettingChange,
                               events::HandlesRead, events::CustomFunctionRuns>;

/// Receives the events of a thread while DispatchTarget::observer points to it. An observer that
/// stands in front of another one forwards every event that it does not hide.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void notice(const HostEvent& event) = 0;
};

/// The observer of the calling thread; null when it has none.
Observer* current_observer();

/// Tells the observer of `event`; costs one branch where there is none.
template <class Event>
inline void notify(const Event& event, Observer* observer = current_observer()) {
  if (observer) [[unlikely]]
    observer->notice(event);
}

}  // namespace tessera
