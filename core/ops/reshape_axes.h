// How reshape maps dims to dims: the strides that view a tensor under another shape, and the loops
// that both shapes share.
#pragma once
#include <optional>

#include "core/primitive/axis_map.h"

namespace tessera {

/// `to` with its -1 replaced by an extent; throws ShapeError unless both shapes have equal numels.
Shape reshaped(const Shape& from, const Shape& to);
/// Strides under which a tensor of `from` and `strides` is seen as `to`; none when that takes a
/// copy.
std::optional<Strides> reshape_strides(const Shape& from, const Strides& strides, const Shape& to);

/// Splits both shapes into common loops, from the outermost dim on: a common divisor of the next
/// extents is a loop of both. Where there is none ([3, 4] to [4, 3]), the rest of the group of dims
/// has no common loops and is whole.
AxisMap reshape_axes(const Shape& from, const Shape& to);

}  // namespace tessera
