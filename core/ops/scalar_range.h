// Checks of numbers beside integer tensors, whose dtype may not hold every number.
#pragma once
#include "core/ops/scalar.h"

namespace tessera {

/// For an integer dtype `t`, its number nearest to `bound`, which a cast would wrap around; for
/// other dtypes `bound` itself.
Scalar nearest_in(DType t, Scalar bound);

/// Throws UserError naming `op` where `value` is not a number or outside the integers of `t`. As in
/// PyTorch, u8 also takes the negatives of its values (-1 is 255), and a fraction is cut off.
void check_holds(std::string_view op, DType t, Scalar value);

}  // namespace tessera
