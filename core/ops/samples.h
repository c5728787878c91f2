// Inputs for the op registry: small tensors with values that depend on a key only.
#pragma once
#include "core/primitive/registry.h"

namespace tessera {

/// f64 values in [low, high), no two equal.
Tensor sample_values(const Shape& shape, double low, double high, uint64_t key);
/// i64 values in [low, high).
Tensor sample_integers(const Shape& shape, int64_t low, int64_t high, uint64_t key);

}  // namespace tessera
