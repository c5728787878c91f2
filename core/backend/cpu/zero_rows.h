// Products of operands with rows of zeros, such as the gradient of a loss that ignores most targets
// (masked language models: 85 % of the rows of the logits' gradient).
#pragma once
#include "core/backend/cpu/gemm.h"

namespace tessera::cpu {

/// C = A B from the rows of A that are not all zeros, where enough of them are to pay for looking:
/// rows of C (A by rows) or terms of every sum (A by columns: what lies densely is a row for one
/// k). It is planned and run as a PlannedGemm is.
class GemmWithoutZeroRows {
 public:
  GemmWithoutZeroRows() = default;
  explicit GemmWithoutZeroRows(const Gemm& g);
  /// Returns false, with C untouched, where too few rows are zeros, the product is small or of
  /// another form, or B holds an infinity or a NaN, which a zero does not cancel. The values are
  /// those of the whole product to rounding: sums have the order of a product of what is left.
  bool run(const void* a, const void* b, void* c) const;

 private:
  const PlannedGemm& product_of(int64_t left) const;
  Gemm g_;
  bool suits_ = false;
  bool by_rows_ = false;
  // The product of as many rows as the last run had left. Only a run can know the number.
  mutable int64_t planned_for_ = -1;
  mutable PlannedGemm product_;
};

}  // namespace tessera::cpu
