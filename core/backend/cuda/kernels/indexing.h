// The host's side of indexing.cu, segments.cu, sparse.cu and sort.cu: instances, and the launches
// of a stable sort. Every kernel has one thread an element: cover(count, 256).
#pragma once
#include <cstdint>

#include "core/backend/cuda/kernels/walk.h"
#include "core/tensor/dtype.h"

namespace tessera::cuda {

/// The widest element, of up to 16 bytes, that rows of `row_bytes` at these addresses consist of.
int element_bytes(int64_t row_bytes, std::span<const void* const> addresses);

/// Recounts c, whose lines have `c.inner` elements of `bytes`, in the widest elements that lines at
/// c.in and c.out consist of; returns their bytes. The index is a vector.
int widen_lines(IndexCall& c, int bytes);

/// Entries gather, claim, scatter, wrap; `index` is i32 or i64.
Instance indexing_instance(int bytes, DType index);
/// Entries segments, segment_packs, sorted and lines; join: sum, prod, amax, amin. `lines` writes
/// the compute type.
Instance segments_instance(std::string_view join, DType in, DType out);
/// Elements of a pack of segment_packs, if rows of `inner` elements at these addresses consist of
/// packs; otherwise 1.
int segment_pack(DType in, DType out, int64_t inner, std::span<const void* const> addresses);
/// Entries check, segment_sum, segment_prod, segment_amax, segment_amin, spmm, spmm_amax,
/// spmm_amin, sddmm, transpose; floats.
Instance sparse_instance(DType dtype);
/// Entries blocks, merge, finish, search.
Instance sort_instance(bool descending, DType dtype);

/// Launches of `blocks` and `merge` in order; the last writes to buffer `result` (0: keys, 1:
/// to_keys). The caller sets `in`, and keys and to_keys to buffers by `from` (0 or 1).
struct SortLaunch {
  const char* entry;
  Geometry geometry;
  SortCall call;
  int from;  // the buffer that is read; `blocks` writes to buffer 0
};
struct SortLaunches {
  std::vector<SortLaunch> launches;
  int result;
};
SortLaunches sort_launches(int64_t outer, int64_t n, int64_t inner);

}  // namespace tessera::cuda
