// The bottom of the dispatch path. Eager runs kernels; Trace records. Below autograd and sharding,
// so a trace sees the rank-local ops of forward, backward, collectives and optimizer in one
// sequence. What a thread does besides ops is told to an Observer (observer.h).
#pragma once
#include "core/primitive/primitive.h"

namespace tessera {

class Backend {
 public:
  virtual ~Backend() = default;
  /// Results of `prim` on `in`. May take over operands that nobody else owns.
  virtual Tensors run(const PrimRef& prim, Inputs in) = 0;
  /// The one effect: the values of `dst[i]` become result i of `prim`, and their versions move.
  /// Shapes and dtypes of destinations and results are equal.
  virtual void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) = 0;
};

/// Runs kernels at once (CPU) or enqueues them (GPU).
Backend& eager_backend();

}  // namespace tessera
