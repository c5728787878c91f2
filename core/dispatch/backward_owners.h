// Who owns the memory of a tensor besides the tensors of the program.
// Internal: not part of the public interface.
#pragma once
#include "core/tensor/tensor.h"

namespace tessera {

/// What the recorded op that `t` is a result of, or a view of one, keeps of the memory of `t`: the
/// results that its backward reads; so for each level of function transforms that recorded it.
/// Defined by core/autograd.
SmallVector<const Tensor*, 2> kept_by_backward(const Tensor& t);

}  // namespace tessera
