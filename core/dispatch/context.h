// State of the calling thread: which layers are on, which backend runs, the stream. No mutable
// globals: N ranks can be N threads of one process. Invariant: every change is scoped (Scoped
// restores on exit).
#pragma once
#include <initializer_list>
#include <string_view>
#include <utility>

#include "core/dispatch/backend.h"
#include "core/tensor/tensor.h"

namespace tessera {

/// A queue of kernels on a device; the CPU's is the calling thread itself.
struct Stream {
  Device device;
  void* handle = nullptr;
};

class Generator;
class CastCache;
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

/// Which part of a training step runs; a trace records it with every op.
enum class Phase : uint8_t { kForward, kBackward, kUpdate };
inline constexpr int kNumPhases = 3;
constexpr std::string_view name_of(Phase p) {
  constexpr std::string_view names[] = {"forward", "backward", "update"};
  return names[int(p)];
}

enum class Communication : uint8_t { kNever, kInLosses, kAlways };

struct Context : DispatchTarget {
  /// The three fields as one, to be kept or handed on.
  DispatchTarget& target() { return *this; }

  // Layers that may look at ops; without kAutograd nothing is recorded for backward.
  LayerMask enabled =
      LayerMask(bit(Layer::kAutocast) | bit(Layer::kAutograd) | bit(Layer::kSharding));
  LayerMask forced = 0;        // layers that look at every op whatever its inputs (autocast)
  DType autocast = kF32;       // what its ops of low precision compute in: core/autograd/autocast.h
  CastCache* casts = nullptr;  // of weights, while an Autocast lives
  Stream stream;
  bool inference = false;          // results may never be recorded later
  DType default_dtype = kF32;      // of creation functions without one
  Generator* generator = nullptr;  // null: the thread's own default
  // Plain operands next to sharded ones hold the same values on every rank (0-d ones always do).
  bool replicate_plain = false;
  // Where forward may convert sharded operands by collectives; backward always may.
  Communication communication = Communication::kNever;
  bool exact_contraction = false;  // new contractions sum in a fixed tree: ExactContraction
  Phase phase = Phase::kForward;   // set by backward() and by optimizers
  uint64_t grad_node = 0;          // number of the node whose vjp runs; 0 outside of backward
  // i64 [B]: number of each sample of the micro-batch in the data set; see random.h.
  Tensor samples;
};
Context& context();

/// True where ops may find their operands cast by autocast: forward, within a scope of it.
inline bool autocast_on() {
  const Context& c = context();
  return (c.forced & c.enabled & bit(Layer::kAutocast)) && c.phase == Phase::kForward;
}

/// True where autocast brings operands of these dtypes to one: functions then leave it to it, or a
/// parameter would be cast by way of another dtype.
inline bool autocast_meets(std::initializer_list<DType> dtypes) {
  bool all = autocast_on();
  for (DType t : dtypes) all = all && is_floating(t) && t != kF64;
  return all;
}

/// Sets a field of the context (or anything else) for one scope.
template <class T>
class Scoped {
 public:
  Scoped(T& field, T value) : field_(field), old_(std::exchange(field, std::move(value))) {}
  ~Scoped() { field_ = std::move(old_); }
  Scoped(const Scoped&) = delete;
  Scoped& operator=(const Scoped&) = delete;

 private:
  T& field_;
  T old_;
};

/// Sends the ops and events of the calling thread to `target` for one scope.
class BackendScope {
 public:
  explicit BackendScope(DispatchTarget target) : target_(context().target(), target) {
    TESSERA_ASSERT(target.backend || !(target.observer || target.records),
                   "dispatch: an observer or a recording without a backend, so that views would "
                   "pass it by");
  }

 private:
  Scoped<DispatchTarget> target_;
};
/// What runs in this scope is no part of what the backend outside records or counts: ops run at
/// once, and nobody is told of the rest.
struct EagerScope : BackendScope {
  EagerScope() : BackendScope({}) {}
};

}  // namespace tessera
