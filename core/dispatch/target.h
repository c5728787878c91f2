// Where the ops and events of a thread go.
#pragma once
#include "core/dispatch/backend.h"
#include "core/dispatch/scoped.h"

namespace tessera {

class Observer;

/// The backend that runs the ops of a thread, and the observer that is told what the thread does
/// besides (observer.h). BackendScope changes them together: a backend in front of another one
/// copies the target outside and replaces what it takes part in, so that the observer stays.
struct DispatchTarget {
  Backend* backend = nullptr;    // null: eager
  Observer* observer = nullptr;  // null: nobody is told; one needs a backend beside it
  // Ops are written down to be run again: numbers in a program then come as ops too, and not as
  // tensors that no op made.
  bool records = false;
};

/// Sends the ops and events of the calling thread to `target` for one scope.
class BackendScope {
 public:
  explicit BackendScope(DispatchTarget target);

 private:
  Scoped<DispatchTarget> target_;
};
/// What runs in this scope is no part of what the backend outside records or counts: ops run at
/// once, and nobody is told of the rest.
struct EagerScope : BackendScope {
  EagerScope() : BackendScope({}) {}
};

}  // namespace tessera
