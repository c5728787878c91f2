// Checks of the windows of convolutions and pools, of floats and of bytes, and the shapes that
// follow from them.
#pragma once
#include "core/ops/conv_attributes.h"
#include "core/ops/pool_attributes.h"

namespace tessera::windows {

/// The largest stride, dilation, padding or kernel: with extents that fit in memory, no position
/// then overflows 64 bits.
inline constexpr int64_t kMost = INT32_MAX;

/// Throws UserError unless the lists of `w` have one number for each of `least` to 3 spatial dims,
/// strides and dilations positive, no number beyond kMost.
void check(std::string_view op, const ConvAttributes::Window& w, int least = 1);
/// Throws ShapeError unless weight [G Co, Ci, ..] takes the channels of x [N, G Ci, ..].
void check_channels(std::string_view op, const ConvAttributes::Window& w, const Shape& x,
                    const Shape& weight);
/// The shape [N, G Co, ..] of what convolving x with `weight` gives. Throws ShapeError where the
/// kernel does not fit.
Shape output(std::string_view op, const ConvAttributes::Window& w, const Shape& x,
             const Shape& weight);

/// Throws UserError unless each list of `w` has a positive number (padding: any number), none
/// beyond kMost, for each of 1 to 3 spatial dims. An adaptive pool has empty lists except for its
/// windows.
void check(std::string_view op, const PoolAttributes::Windows& w);
/// Throws ShapeError unless every window meets x [N, C, ..].
void check_meet(std::string_view op, const PoolAttributes::Windows& w, const Shape& x);

}  // namespace tessera::windows
