// A view that a trace did not see being made: a layout of memory that some value lives in.
#pragma once
#include "core/primitive/primitive.h"

namespace tessera::compiler {

/// Sees the memory of its operand through other extents and strides, beginning `offset` elements
/// from where the operand begins (which may be negative).
PrimRef as_strided(const Shape& shape, const Strides& strides, int64_t offset);

/// First and one past the last element that a layout touches, counted from the storage's begin.
Range extent_of(const Meta& meta, int64_t offset);

}  // namespace tessera::compiler
