// Operations as users of PyTorch call them, one by one, for `bench serve` and the scripts that
// compare them with PyTorch's (scripts/reference/bench_ops.py has the same names and shapes).
// Invariant: a call does all that it does for a user, which includes results in memory of their
// own.
#pragma once
#include <vector>

#include "examples/bench/cases.h"

namespace tessera::bench {

/// Products, convolutions, pointwise, normalising and attention ops in fp32 and bf16, on tens of
/// kilobytes to tens of megabytes. Memory is only held after `prepare`.
std::vector<Case> compared_cases();

}  // namespace tessera::bench
