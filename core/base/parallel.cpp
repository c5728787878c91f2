#include "core/base/parallel.h"

#include <omp.h>

#include <algorithm>
#include <exception>
#include <mutex>

#include "core/base/error.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace tessera {
namespace {

// The thread sanitizer does not see inside libgomp. These edges tell it what OpenMP promises: a
// region's threads begin after what came before it, and what comes after it begins when all have
// ended. An edge orders all regions of the process, so where a test looks for races between ranks
// that are threads, each uses one OpenMP thread and passes no edge.
enum Edge { kFork, kJoin };
#if defined(__SANITIZE_THREAD__)
char edges[2];
void release(Edge e) { __tsan_release(&edges[e]); }
void acquire(Edge e) { __tsan_acquire(&edges[e]); }
#else
void release(Edge) {}
void acquire(Edge) {}
#endif

// Calls piece(thread, threads) on each of at most `threads` threads. It is not instrumented,
// because the compiler hands the arguments to the threads behind the first edge.
[[gnu::no_sanitize_thread]] void run_region(int threads,
                                            FunctionRef<void(int64_t, int64_t)> piece) {
  release(kFork);
#pragma omp parallel num_threads(threads)
  {
    acquire(kFork);
    piece(omp_get_thread_num(), omp_get_num_threads());
    release(kJoin);
  }
  acquire(kJoin);
}

}  // namespace

int num_threads() { return omp_get_max_threads(); }

void set_num_threads(int n) {
  TESSERA_CHECK(n >= 1, "set_num_threads: got {}, expected at least 1", n);
  omp_set_num_threads(n);
}

void detail::share(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t)> body) {
  if (n <= 0) return;
  int64_t pieces = std::min<int64_t>(n / std::max<int64_t>(grain, 1), omp_get_max_threads());
  if (pieces <= 1 || omp_in_parallel()) return body(0, n);
  std::exception_ptr failure;
  std::mutex failing;
  run_region(int(pieces), [&](int64_t me, int64_t threads) {
    // OpenMP may grant fewer threads than asked for; cut by what it granted.
    int64_t begin = n * me / threads, end = n * (me + 1) / threads;
    try {
      if (begin < end) body(begin, end);
    } catch (...) {
      std::lock_guard lock(failing);
      if (!failure) failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tessera
