// Where the ops and the events of a thread go: its backend and its observer.
#pragma once
#include "core/dispatch/backend.h"
#include "core/dispatch/scoped.h"

namespace tessera {

class Observer;

/// The backend that runs the ops of a thread, and the observer that is told what else the thread
/// does (observer.h). BackendScope replaces both together: a backend in front of another one copies
/// the target outside and replaces only `backend`, so that the observer stays.
struct DispatchTarget {
  Backend* backend = nullptr;    // null: eager
  Observer* observer = nullptr;  // null: events are not sent; needs a backend
  // Ops are recorded to be run again. A number in a program then becomes an op too, since a tensor
  // that no op made would be missing from the replay.
  bool records = false;
};

/// Sends the ops and events of the calling thread to `target` for one scope.
class BackendScope {
 public:
  explicit BackendScope(DispatchTarget target);

 private:
  Scoped<DispatchTarget> target_;
};
/// Runs ops at once and sends no events while it lives: the backend outside neither records nor
/// counts what happens in this scope.
struct EagerScope : BackendScope {
  EagerScope() : BackendScope({}) {}
};

}  // namespace tessera
