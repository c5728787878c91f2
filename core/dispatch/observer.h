// What a thread does besides running ops, told to one that records them. An event is a value; the
// code that does the thing calls notify(), and the observer of the thread, if there is one, learns
// of it before it happens. Invariant: the references of an event are good until notify() returns;
// an observer that keeps a place (a slot, the value of a setting) keeps the event's owner too.
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

/// The thread is about to do something that is no op and that replaying ops would leave out: talk
/// to other ranks through a group, add a hook, change a module. Sent by the verbs of a process
/// group, nn::Module and the hooks of gradients. An observer whose backend puts ops off runs them
/// before it returns; one that cannot go on throws UserError. `what` makes the text that names the
/// deed and its place, and is called only when somebody wants it.
struct LeavesOps {
  FunctionRef<std::string()> what;
};

/// The value of a tensor is about to be read on the host: sent by Tensor::item, `where` is the
/// place of that call. What the program does next may depend on it, and ops that were put off have
/// to have run when the observer returns.
struct ValueRead {
  std::source_location where;
};

/// `slot`, a handle that outlives the ops, is read: the gradient of a leaf, by Tensor::grad.
/// `owner` keeps the slot alive. What was recorded depends on the tensor that is there.
struct SlotRead {
  const RefCounted& owner;
  const Tensor& slot;
};
/// `slot` is about to take `now`, or nothing where that is undefined: sent by Tensor::set_grad and
/// by backward. A replay of the ops puts there what the recording left.
struct SlotChange {
  const RefCounted& owner;
  Tensor& slot;
  const Tensor& now;
};

/// Which ops come next depends on `value`, a number that outlives them and that `owner` keeps
/// alive: sent by TrackedSetting (tracked_setting.h) and where the hooks of a gradient run. Ops
/// that were recorded under one value are not replayed under another.
struct SettingRead {
  const RefCounted& owner;
  const int64_t& value;
};
/// `value` is about to change. A replay of the ops sets it to what the recording left.
struct SettingChange {
  const RefCounted& owner;
  int64_t& value;
};

/// An op is called on these handles, or the program asks whether one requires a gradient: sent by
/// dispatch() before any layer sees the op, and by Tensor::requires_grad. What comes next depends
/// on what the handles carry besides memory. Some may be undefined.
struct HandlesRead {
  std::span<const Tensor> handles;
};

/// The forward or the vjp of the custom function `name` begins, or ends. Where it reads values, an
/// observer can say who did.
struct CustomFunctionRuns {
  std::string_view name;
  bool begins;
};

}  // namespace events

using HostEvent = std::variant<events::LeavesOps, events::ValueRead, events::SlotRead,
                               events::SlotChange, events::SettingRead, events::SettingChange,
                               events::HandlesRead, events::CustomFunctionRuns>;

/// Stands in DispatchTarget::observer while it listens to a thread. An observer in front of another
/// one hands on what it does not hide.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void notice(const HostEvent& event) = 0;
};

/// That of the calling thread; null: nobody listens.
Observer* current_observer();

/// Tells the observer; one branch where there is none.
template <class Event>
inline void notify(const Event& event, Observer* observer = current_observer()) {
  if (observer) [[unlikely]]
    observer->notice(event);
}

}  // namespace tessera
