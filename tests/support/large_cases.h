// Calls at real sizes: for every limit at which a kernel cuts its work (core/base/boundaries.h),
// extents one short of it, at it and one beyond it. Extents are written out, not made from the
// limits: a limit that moves is no longer crossed, and the sweep says so.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/tensor/tensor.h"

namespace tessera::test {

struct LargeCase {
  std::string name;
  /// f64 and i64. Floats have eight digits, which all dtypes hold: one reference serves every
  /// dtype, and what differs is the rounding of the op itself.
  std::vector<Tensor> in;
  std::function<std::vector<Tensor>(const std::vector<Tensor>&)> f;
  /// Terms of the longest sum behind an element of a result or gradient.
  int64_t length = 1;
  bool gradients = true;
  /// Roundings to 16 bits behind an element of a result; 0: the call takes no 16-bit floats.
  int roundings = 1;
  /// In f64 the reference cuts loops until they are at most so long.
  int64_t part = 13;
};

std::vector<LargeCase> large_cases();

// By family; each appends its own.
using LargeCases = std::vector<LargeCase>;
void add_reductions(LargeCases& cases);
void add_rows(LargeCases& cases);  // softmax, losses, norms, embedding
void add_attention(LargeCases& cases);
void add_products(LargeCases& cases);
void add_elementwise(LargeCases& cases);  // and indexing, sorting, scans, dropout
void add_windows(LargeCases& cases);      // convolutions, pools
void add_updates(LargeCases& cases);

/// Multiples of 2^-7 in [low, high); of larger powers of two where values are beyond 1.
Tensor grid_values(const Shape& shape, uint64_t key, double low = -1, double high = 1);

/// Results of the call on operands in `dtype`, then, with `gradients`, those of a fixed weighted
/// sum of the results by each float operand; as f64.
std::vector<Tensor> evaluate(const LargeCase& c, DType dtype);

}  // namespace tessera::test
