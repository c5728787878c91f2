// What windows must be, whoever slides them: convolutions and pools of floats and of bytes check
// them here.
#pragma once
#include "core/ops/conv_attributes.h"
#include "core/ops/pool_attributes.h"

namespace tessera::windows {

/// The largest stride, dilation, padding or kernel: with extents that a memory holds, no place
/// leaves 64 bits.
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

/// Throws UserError unless the lists of `w` have one positive number (padding: any), none beyond
/// kMost, for each of 1
/// to 3 spatial dims; those of an adaptive pool, but for its windows, are empty.
void check(std::string_view op, const PoolAttributes::Windows& w);
/// Throws ShapeError unless every window meets x [N, C, ..].
void check_meet(std::string_view op, const PoolAttributes::Windows& w, const Shape& x);

}  // namespace tessera::windows
