// The bottom of the dispatch path. Eager runs kernels; Trace records. Below autograd and sharding,
// so a trace sees the rank-local ops of forward, backward, collectives and optimizer in one
// sequence.
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
  /// True when ops are written down to be run again: numbers in a program then come as ops too,
  /// and not as tensors that nobody made.
  virtual bool records() const { return false; }
};

/// Runs kernels at once (CPU) or enqueues them (GPU).
Backend& eager_backend();

}  // namespace tessera
