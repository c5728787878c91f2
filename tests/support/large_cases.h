// Calls at real sizes: for every limit at which a kernel cuts its work (core/base/boundaries.h),
// extents one short of it, at it and one beyond it. Extents are written out, not made from the
// limits: a limit that moves is no longer crossed, and the sweep says so.
#pragma once
#include <functional>
#include <set>
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
  /// Elements are equal between which the gradient chooses: another rounding chooses otherwise.
  bool ties = false;
  /// Some values lie where a result jumps, as halves do when they are rounded: operands that are
  /// summed of parts may then give another result.
  bool jumps = false;
  /// The call draws from the default generator, which is seeded before: every dtype drops the same.
  bool draws = false;
  int threads = 3;
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
void add_linalg(LargeCases& cases);       // and sparse rows, bytes
// What kernels of these dtypes alone compute.
void add_f32_convolutions(LargeCases& cases);
void add_bf16_convolutions(LargeCases& cases);
void add_updates(LargeCases& cases);
void add_generated(LargeCases& cases);  // what compile makes kernels of

/// Multiples of 2^-7 in [low, high); of larger powers of two where values are beyond 1.
Tensor grid_values(const Shape& shape, uint64_t key, double low = -1, double high = 1);

/// The operands of the call in `dtype`: all floats but numbers (0-d), which stay f64.
std::vector<Tensor> operands_in(const LargeCase& c, DType dtype);
/// Seeds the default generator where the call draws from it.
void seed(const LargeCase& c);
/// Results of the call on these operands, then, with `gradients`, those of a fixed weighted
/// sum of the results by each float operand; in the dtype that they have.
std::vector<Tensor> evaluate(const LargeCase& c, const std::vector<Tensor>& operands);

struct OpsMet {
  std::set<std::string> large;  // with more than a thousand elements, views aside
  std::set<std::string> whole;  // with a loop that the reference cannot cut
};
/// What the call is in f64, computed in parts (in_parts.h). Names of its ops, those of backward
/// included, are added to `met`.
std::vector<Tensor> reference(const LargeCase& c, OpsMet* met = nullptr);

/// How far an element may be off in `dtype`, as a part of the largest magnitude of its tensor; see
/// the analysis there.
double tolerance(const LargeCase& c, DType dtype, bool gradient);

/// The first result or gradient that is further off, in words; "" where all are close.
std::string difference(const LargeCase& c, DType dtype, const std::vector<Tensor>& got,
                       const std::vector<Tensor>& want);

}  // namespace tessera::test
