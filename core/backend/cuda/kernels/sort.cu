// Stable sorting of lines [outer, n, inner] along n: `blocks` sorts runs of 1,024 in shared memory,
// `merge` doubles the runs until one is left, `finish` writes the first `kept` values and positions
// back in place. Also searchsorted. After device.h. Invariant: elements are compared with
// their positions, so the order is total and does not depend on how it is found; NaN is the largest
// value and equal to itself.
namespace tessera::device {

inline constexpr unsigned kSortThreads = 256, kSortRun = 1024;

template <class C>
TESSERA_FN bool below(C a, C b) {
  return a < b || (b != b && a == a);
}
/// Whether key x at position i comes before key y at position j.
template <bool kDescending, class C>
TESSERA_FN bool before(C x, int i, C y, int j) {
  if (kDescending ? below(y, x) : below(x, y)) return true;
  if (kDescending ? below(x, y) : below(y, x)) return false;
  return i < j;
}

/// A block sorts a run of one line: keys and positions [lines, n]. Places behind the end of a line
/// have positions of n and more, and keys that come last or equal the last.
template <bool kDescending, class T>
TESSERA_FN void sort_run(const SortCall& c) {
  using C = Compute<T>;
  __shared__ C keys[kSortRun];
  __shared__ int places[kSortRun];
  const unsigned line = blockIdx.x / c.runs, run = blockIdx.x % c.runs;
  const unsigned o = line / c.inner, i = line % c.inner, begin = run * kSortRun;
  const T* in = static_cast<const T*>(c.in) + long(o) * c.n * c.inner + i;
  for (unsigned k = threadIdx.x; k < kSortRun; k += kSortThreads) {
    const bool there = begin + k < c.n;
    keys[k] = there ? widen(in[long(begin + k) * c.inner]) : C(0);
    places[k] = there ? int(begin + k) : -1;
  }
  // Bitonic (Batcher 1968): place k meets place k ^ distance.
  for (unsigned size = 2; size <= kSortRun; size *= 2)
    for (unsigned distance = size / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (unsigned t = threadIdx.x; t < kSortRun / 2; t += kSortThreads) {
        const unsigned low = t / distance * distance * 2 + t % distance, high = low + distance;
        const bool up = (low & size) == 0;
        const bool low_ends = places[low] < 0, high_ends = places[high] < 0;
        const bool swapped =
            high_ends  ? false
            : low_ends ? true
                       : before<kDescending>(keys[high], places[high], keys[low], places[low]);
        // Places that are not there come last; two of them stay.
        const bool other =
            low_ends    ? false
            : high_ends ? true
                        : before<kDescending>(keys[low], places[low], keys[high], places[high]);
        if (up ? swapped : other) {
          const C key = keys[low];
          const int place = places[low];
          keys[low] = keys[high], places[low] = places[high];
          keys[high] = key, places[high] = place;
        }
      }
    }
  __syncthreads();
  for (unsigned k = threadIdx.x; k < kSortRun; k += kSortThreads)
    if (begin + k < c.n) {
      static_cast<C*>(c.keys)[long(line) * c.n + begin + k] = keys[k];
      c.places[long(line) * c.n + begin + k] = places[k];
    }
}

/// Merges runs of `c.run` by pairs: an element's place in the result is its own place in its run
/// plus the number of elements of the other run that come before it.
template <bool kDescending, class C>
TESSERA_FN void merge_runs(const SortCall& c) {
  const unsigned e = blockIdx.x * kSortThreads + threadIdx.x;
  if (e >= c.count) return;
  const unsigned line = e / c.n, k = e % c.n, pair = k / (2 * c.run) * (2 * c.run);
  const bool second = k - pair >= c.run;
  const C* keys = static_cast<const C*>(c.keys) + long(line) * c.n;
  const int* places = c.places + long(line) * c.n;
  const unsigned middle = pair + c.run < c.n ? pair + c.run : c.n;
  const unsigned end = pair + 2 * c.run < c.n ? pair + 2 * c.run : c.n;
  unsigned low = second ? pair : middle, high = second ? middle : end;
  const unsigned first = low;
  while (low < high) {
    const unsigned at = low + (high - low) / 2;
    if (before<kDescending>(keys[at], places[at], keys[k], places[k]))
      low = at + 1;
    else
      high = at;
  }
  const unsigned to = pair + (k - (second ? middle : pair)) + (low - first);
  static_cast<C*>(c.to_keys)[long(line) * c.n + to] = keys[k];
  c.to_places[long(line) * c.n + to] = places[k];
}

/// values and positions [outer, kept, inner] of the first `kept` of each sorted line.
template <class T>
TESSERA_FN void finish_sort(const SortCall& c) {
  const unsigned e = blockIdx.x * kSortThreads + threadIdx.x;
  if (e >= c.count) return;
  const unsigned i = e % c.inner, k = e / c.inner % c.kept, o = e / c.inner / c.kept;
  const long line = long(o) * c.inner + i;
  const int place = c.places[line * c.n + k];
  if (c.values)
    static_cast<T*>(c.values)[e] =
        static_cast<const T*>(c.in)[(long(o) * c.n + place) * c.inner + i];
  c.positions[e] = place;
}

/// positions[e] = the first place of a sorted row at which values[e] could stand, the last where
/// `right`; rows [outer, n], values [outer, inner].
template <class T>
TESSERA_FN void search(const SortCall& c) {
  const unsigned e = blockIdx.x * kSortThreads + threadIdx.x;
  if (e >= c.count) return;
  const T* row = static_cast<const T*>(c.in) + (c.outer > 1 ? long(e / c.inner) * c.n : 0);
  const Compute<T> value = widen(static_cast<const T*>(c.values)[e]);
  unsigned low = 0, high = c.n;
  while (low < high) {
    const unsigned at = low + (high - low) / 2;
    const Compute<T> x = widen(row[at]);
    if (c.right ? !below(value, x) : below(x, value))
      low = at + 1;
    else
      high = at;
  }
  c.positions[e] = low;
}

}  // namespace tessera::device

// instances: DESCENDING, T
KERNEL(blocks, SortCall, 256) { sort_run<DESCENDING, T>(c); }
KERNEL(merge, SortCall, 256) { merge_runs<DESCENDING, Compute<T>>(c); }
KERNEL(finish, SortCall, 256) { finish_sort<T>(c); }
KERNEL(search, SortCall, 256) { search<T>(c); }
