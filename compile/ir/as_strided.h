// The view that stands for one that was made outside of a trace: a layout of memory that some
// recorded value lives in.
#pragma once
#include "core/primitive/primitive.h"

namespace tessera::compiler {

/// An op that views the memory of its operand with other extents and strides, beginning `offset`
/// elements (which may be negative) from the operand's first.
PrimRef as_strided(const Shape& shape, const Strides& strides, int64_t offset);

/// The range from the first element that a layout touches to one past the last, counted from the
/// beginning of the storage.
Range extent_of(const Meta& meta, int64_t offset);

}  // namespace tessera::compiler
