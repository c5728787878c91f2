// State of the calling thread: which layers are on, which backend runs, the stream. No mutable
// globals: N ranks can be N threads of one process. Invariant: every change is scoped (Scoped
// restores on exit).
#pragma once
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

struct Context {
  // Layers that may look at ops; without kAutograd nothing is recorded for backward.
  LayerMask enabled =
      LayerMask(bit(Layer::kAutocast) | bit(Layer::kAutograd) | bit(Layer::kSharding));
  LayerMask forced = 0;        // layers that look at every op whatever its inputs (autocast)
  Backend* backend = nullptr;  // null: eager
  Stream stream;
  bool inference = false;          // results may never be recorded later
  DType default_dtype = kF32;      // of creation functions without one
  Generator* generator = nullptr;  // null: the thread's own default
  Tensor
      samples;  // i64 [B]: number of each sample of the micro-batch in the data set; see random.h
};
Context& context();

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

}  // namespace tessera
