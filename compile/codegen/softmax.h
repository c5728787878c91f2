// What is known of the exponentials of a softmax, exp(x - max(x)) along a row, which allows text
// that would be wrong elsewhere.
#pragma once
#include "compile/codegen/schedule.h"

namespace tessera::compiler {

/// exp(x - amax(x)) of float32, which needs no care for large results.
bool is_exp_below_max(const Schedule& s, InstrId id);
/// A row's sum of those, which is at least 1: dividing by it is multiplying by its reciprocal.
bool is_softmax_sum(const Schedule& s, InstrId id);
/// Whether `max`, a maximum over a row, may pass over NaN: the sum of the row's exponentials is NaN
/// where an element is, and so is, through it, all that would have been through the maximum.
bool may_pass_over_nan(const Schedule& s, InstrId max);

}  // namespace tessera::compiler
