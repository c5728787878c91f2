// Sorted lines, which ops that sort and gradients that add by position share.
#pragma once
#include "core/tensor/stream.h"
#include "core/tensor/tensor.h"

namespace tessera::cuda {

/// Keys in the compute type, and where each was in its line, i32; both [outer, inner, n].
struct Sorted {
  Tensor keys, places;
};
/// Enqueues a stable sort of the lines of x, dense and seen as [outer, n, inner].
Sorted sorted(const Tensor& x, int64_t outer, int64_t n, int64_t inner, bool descending,
              const Stream& stream);

}  // namespace tessera::cuda
