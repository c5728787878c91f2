// Records which limits of boundaries.h were met, and how closely. A kernel that cuts its work says
// with which extent; nothing is recorded unless a test counts.
#pragma once
#include <atomic>

#include "core/base/boundaries.h"
#include "core/base/parallel.h"

namespace tessera {

/// A row of kBoundaries by its name, found when the program is compiled.
struct BoundaryName {
  int index;
  consteval BoundaryName(const char* name) : index(boundary_index(name)) {}
};

/// While one lives, limits that are met anywhere in the process are counted, on top of those
/// counted before.
class CountBoundaries {
 public:
  CountBoundaries();
  ~CountBoundaries();
  CountBoundaries(const CountBoundaries&) = delete;
  CountBoundaries& operator=(const CountBoundaries&) = delete;
};

/// What has been met of row `index`: bit 0 one short of the limit, bit 1 the limit, bit 2 one more.
uint8_t boundary_met(int index);

namespace detail {
extern std::atomic<int> boundary_counters;
void record_boundary(int index, int64_t extent, int64_t limit);
}  // namespace detail

/// Whether a test counts. A kernel that would have to compute a limit for it does so only then.
inline bool counting_boundaries() {
  return detail::boundary_counters.load(std::memory_order_relaxed) != 0;
}
/// A kernel cuts `extent` by a limit: that of the table, or one that depends on other extents.
inline void meet(BoundaryName b, int64_t extent, int64_t limit) {
  if (counting_boundaries()) [[unlikely]]
    detail::record_boundary(b.index, extent, limit);
}
inline void meet(BoundaryName b, int64_t extent) { meet(b, extent, kBoundaries[b.index].limit); }

/// A loop over threads has this grain: two threads share it from two grains on.
inline void meet_threads(BoundaryName b, int64_t n, int64_t grain) { meet(b, n, 2 * grain); }
/// Calls body(begin, end) over a partition of [0, n) into pieces of at least `grain` items, and
/// returns when all are done. Runs inline when one piece suffices or when already inside a
/// parallel_for. The first exception is rethrown.
inline void parallel_for(BoundaryName b, int64_t n, int64_t grain,
                         FunctionRef<void(int64_t, int64_t)> body) {
  meet_threads(b, n, grain);
  detail::share(n, grain, body);
}

}  // namespace tessera
