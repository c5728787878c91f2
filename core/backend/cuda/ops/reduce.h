// Reductions on tensors, which other families use for partial results.
#pragma once
#include <string_view>

#include "core/tensor/stream.h"
#include "core/tensor/tensor.h"

namespace tessera::cuda {

/// Enqueues the reduction of x, dense and seen as [outer, n, inner], by `join` (an op's name: sum,
/// amax, ..) into `to` of outer * inner elements.
void reduce_to(std::string_view join, const Tensor& x, const Tensor& to, int64_t outer, int64_t n,
               int64_t inner, const Stream& stream);

/// Enqueues the reduction of x, dense, over the dims whose bit is set in `mask`, into `to`.
void reduce_dims(std::string_view join, const Tensor& x, uint32_t mask, const Tensor& to,
                 const Stream& stream);

}  // namespace tessera::cuda
