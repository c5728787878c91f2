// The bottom of the dispatch path: the eager backend runs kernels, a tracing one records ops. It
// lies below autograd and sharding, so a trace sees the rank-local ops of forward, backward,
// collectives and optimizer in one sequence. An Observer hears of the rest (observer.h).
#pragma once
#include "core/primitive/primitive.h"

namespace tessera {

class Backend {
 public:
  virtual ~Backend() = default;
  /// Results of `prim` on `in`. May overwrite an operand that has no other owner.
  virtual Tensors run(const PrimRef& prim, Inputs in) = 0;
  /// The one effect: `dst[i]` takes the values of result i of `prim`; its version is counted up.
  /// Shapes and dtypes of destinations and results are equal.
  virtual void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) = 0;
};

/// Runs kernels at once (CPU) or enqueues them (GPU).
Backend& eager_backend();

}  // namespace tessera
