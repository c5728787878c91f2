// Numbers beside tensors of integers that do not hold every number.
#pragma once
#include "core/ops/scalar.h"

namespace tessera {

/// The number of an integer dtype `t` nearest to `bound`, which would wrap around; of other dtypes
/// `bound` itself.
Scalar nearest_in(DType t, Scalar bound);

/// Throws UserError naming `op` where `value` is beyond the integers of `t`, or no number. As in
/// PyTorch u8 takes the negatives of its values too (-1 is 255), and a fraction is cut off.
void check_holds(std::string_view op, DType t, Scalar value);

}  // namespace tessera
