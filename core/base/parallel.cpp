#include "core/base/parallel.h"

#include <omp.h>

#include <algorithm>
#include <exception>

#include "core/base/error.h"

namespace tessera {

int num_threads() { return omp_get_max_threads(); }

void set_num_threads(int n) {
  TESSERA_CHECK(n >= 1, "set_num_threads: got {}, expected at least 1", n);
  omp_set_num_threads(n);
}

void parallel_for(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t)> body) {
  if (n <= 0) return;
  int64_t pieces = std::min<int64_t>(n / std::max<int64_t>(grain, 1), omp_get_max_threads());
  if (pieces <= 1 || omp_in_parallel()) return body(0, n);
  std::exception_ptr failure;
#pragma omp parallel num_threads(int(pieces))
  {
    // OpenMP may grant fewer threads than asked for; cut by what it granted.
    int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    int64_t begin = n * me / threads, end = n * (me + 1) / threads;
    try {
      if (begin < end) body(begin, end);
    } catch (...) {
#pragma omp critical(tessera_parallel_for)
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tessera
