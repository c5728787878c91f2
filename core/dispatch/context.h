// State of the calling thread: which layers are on, which backend runs. There are no mutable
// globals, so N ranks can be N threads of one process. Invariant: every change is scoped (Scoped
// restores on exit). Headers do not include this file, since a change of it recompiles what
// includes it. They include files that declare the access to single fields (target.h,
// default_device.h).
#pragma once
#include "core/dispatch/phase.h"
#include "core/dispatch/target.h"
#include "core/tensor/tensor.h"

namespace tessera {

class Generator;
class CastCache;

enum class Communication : uint8_t { kNever, kInLosses, kAlways };

struct Context : DispatchTarget {
  /// The fields of DispatchTarget as one value, to be copied or replaced.
  DispatchTarget& target() { return *this; }

  // Layers that may look at ops; without kAutograd nothing is recorded for backward.
  LayerMask enabled =
      LayerMask(bit(Layer::kAutocast) | bit(Layer::kAutograd) | bit(Layer::kSharding));
  LayerMask forced = 0;            // layers that look at every op whatever its inputs (autocast)
  DType autocast = kF32;           // dtype of ops that autocast runs in 16 bits: autocast.h
  CastCache* casts = nullptr;      // casts of weights, while an Autocast lives
  bool inference = false;          // results may never be recorded later
  DType default_dtype = kF32;      // of new tensors, where none is given
  Generator* generator = nullptr;  // null: the thread's default_generator()
  // A plain operand beside a sharded one has the same values on every rank (0-d ones always do).
  bool replicate_plain = false;
  // Where forward may convert sharded operands by collectives; backward always may.
  Communication communication = Communication::kNever;
  bool exact_contraction = false;  // new contractions sum in a fixed tree: ExactContraction
  Phase phase = Phase::kForward;   // set by backward() and by optimizers
  uint64_t grad_node = 0;          // number of the node whose vjp runs; 0 outside of backward
  // i64 [B]: the number in the data set of each sample of the micro-batch; see random.h.
  Tensor samples;
};
Context& context();

}  // namespace tessera
