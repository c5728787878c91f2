// The host's side of Walk: nests of loops over strided operands, with dims merged where all
// operands allow it and cut into pieces that 32-bit arithmetic can count. Invariant: the positions
// of the pieces are those of the nest, each once, in the order of the result's memory.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/backend/cuda/kernels/parameters.h"
#include "core/backend/cuda/kernels/text.h"

namespace tessera::cuda {

Divisor make_divisor(uint32_t divisor);

/// An operand of a walk: strides in elements for every dim of the result, 0 where it is broadcast.
struct Strided {
  const void* data = nullptr;  // null: a number given by value
  int bytes = 1;               // of an element
  std::span<const int64_t> strides;
};

/// A loop of a nest, with its step in elements of each operand.
struct Loop {
  int64_t extent;
  int64_t stride[kWalkOperands];
};

/// The loops of more than one position, the innermost of the result first, merged where all
/// operands allow it; one of a single position where there are no others.
std::vector<Loop> merged_loops(std::span<const int64_t> extents, std::span<const Strided> operands);

/// A piece of a walk; `begin` is where each operand begins, in elements from its data.
struct WalkPiece {
  Walk walk;
  int64_t begin[kWalkOperands];
};

/// Walks over `extents`, of the result (operand 0) and the others. With `width` > 1 the walk's
/// positions are packs of so many elements, and the result is empty unless every operand allows it:
/// innermost loop dense or broadcast, outer strides and the extent multiples of a pack; addresses
/// are for are_packs to look at. Without positions the result is empty as well.
std::vector<WalkPiece> make_walks(std::span<const int64_t> extents,
                                  std::span<const Strided> operands, int width = 1);

/// Whether the operands of a piece of packs of `width` elements, which was made without their
/// addresses, lie at multiples of a pack.
bool are_packs(const WalkPiece& piece, std::span<const Strided> operands, int width);

/// Blocks of `threads` that cover `count` items, `each` of them a thread.
Geometry cover(int64_t count, int threads, int64_t each = 1);

}  // namespace tessera::cuda
