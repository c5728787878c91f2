// Data parallelism on the CPU: OpenMP is the one thread pool. Invariant: how a loop is cut never
// depends on timing, and kernels that reduce cut by problem size, not by thread count, so results
// do not depend on the number of threads.
#pragma once
#include <cstdint>

#include "core/base/function_ref.h"

namespace tessera {

/// Threads a parallel_for of the calling thread may use (at least 1).
int num_threads();
/// Sets num_threads() for the calling thread. Ranks that are threads of one process use 1 each.
void set_num_threads(int n);

namespace detail {
/// parallel_for of boundary.h, which gives every loop a name.
void share(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t)> body);
}  // namespace detail

/// parallel_for of boundary.h without a row in the table of limits: for kernels outside of this
/// tree, whose limits no test of it meets.
inline void parallel_ranges(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t)> body) {
  detail::share(n, grain, body);
}

}  // namespace tessera
