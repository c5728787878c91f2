// Who owns the memory of a tensor besides the tensors of the program.
// Internal: not part of the public interface.
#pragma once
#include "core/tensor/tensor.h"

namespace tessera {

/// How many owners the memory of `t` has in the recorded op that `t` is a result of, or a view of
/// one: the op keeps results that its backward reads. Defined by core/autograd.
int64_t owners_in_backward(const Tensor& t);

}  // namespace tessera
