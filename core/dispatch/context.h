// State of the calling thread: which layers are on, which backend runs, the stream. No mutable
// globals: N ranks can be N threads of one process. Invariant: every change is scoped (Scoped
// restores on exit). For files that read or change it: what headers need of it (a scope of one
// field, a question about one) is declared where it belongs and defined in a file.
#pragma once
#include "core/dispatch/phase.h"
#include "core/dispatch/stream.h"
#include "core/dispatch/target.h"
#include "core/tensor/tensor.h"

namespace tessera {

class Generator;
class CastCache;

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

}  // namespace tessera
