// A hash of the bits of a tensor, computed where the tensor is: what ranks or devices hold can be
// compared without being copied.
#pragma once
#include "core/tensor/tensor.h"

namespace tessera {

/// x [..] of any dtype -> i64 [2], on its device: the two sums of functors/bits_hash.h over the
/// words of its elements, row-major and little-endian, and one more word behind them, the number of
/// bytes. Equal on all devices. Not differentiable. It finds what memory or transfers change, not
/// what somebody makes up to be equal.
Tensor bits_hash(const Tensor& x);

}  // namespace tessera
