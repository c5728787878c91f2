// Products of operands with rows of zeros, such as the gradient of a loss that ignores most targets
// (masked language models: 85 % of the rows of the logits' gradient).
#pragma once
#include "core/backend/cpu/gemm.h"

namespace tessera::cpu {

/// Computes C = A B from the rows of A that are not all zeros, where enough of them are to pay for
/// looking: rows of C (A by rows) or terms of every sum (A by columns: what lies densely is a row
/// for one k). Returns false, with C untouched, where there are too few, the product is small, or B
/// holds an infinity or a NaN, which a zero does not cancel. The values are those of the whole
/// product to rounding: sums have the order of a product of what is left.
bool run_gemm_without_zero_rows(const Gemm& g, const void* a, const void* b, void* c);

}  // namespace tessera::cpu
