// The arithmetic of reshape: which strides view a tensor under another shape, and which loops both
// shapes share.
#pragma once
#include <optional>

#include "core/primitive/axis_map.h"

namespace tessera {

/// `to` with the extent that its -1 stands for; throws ShapeError unless it has as many elements.
Shape reshaped(const Shape& from, const Shape& to);
/// Strides under which a tensor of `from` and `strides` is seen as `to`; none when that takes a
/// copy.
std::optional<Strides> reshape_strides(const Shape& from, const Strides& strides, const Shape& to);

/// The common refinement of both shapes, from the outside in: where the outermost remaining extents
/// share a divisor, that is a loop of both; where they do not ([3, 4] to [4, 3]) the rest of the
/// group has no common loops and is whole.
AxisMap reshape_axes(const Shape& from, const Shape& to);

}  // namespace tessera
