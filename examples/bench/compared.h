// Operations as PyTorch's users call them, one by one, for `bench serve` and the scripts that put
// the same ones of PyTorch beside them (scripts/reference/bench_ops.py has the same names and
// shapes). Invariant: a call does what it costs a user, results in memory of their own included.
#pragma once
#include <vector>

#include "examples/bench/cases.h"

namespace tessera::bench {

/// Products, convolutions, pointwise, normalising and attention ops, fp32 and bf16, at shapes of
/// tens of kilobytes to tens of megabytes. Nothing is held until `prepare`.
std::vector<Case> compared_cases();

}  // namespace tessera::bench
