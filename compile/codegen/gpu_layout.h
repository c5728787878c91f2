// How a scheduled body is spread over the threads of a card. Without reductions a thread takes
// packs of neighbouring elements of all loops. With sums over rows alone a unit (a warp, or a
// block) takes a tile of columns and runs down some rows. With reductions inside rows a unit takes
// whole rows, whose elements its threads keep in registers from one nest to the next where they
// fit. Sums over rows leave a partial result of each unit in scratch, which a second kernel joins
// in order. Invariant: everything here follows from the body, not from the card, and so do the
// bits.
#pragma once
#include <optional>
#include <vector>

#include "compile/codegen/schedule.h"

namespace tessera::compiler {

struct GpuLayout {
  enum class Kind : uint8_t { kElements, kColumns, kRows };
  Kind kind = Kind::kElements;
  int64_t rows = 1, columns = 1;  // choices of the outer and of the inner loops' indices
  int width = 1;      // elements of the innermost loop that a thread reads and writes at once
  int threads = 256;  // in a unit: a warp, or all threads of a block
  int packs = 1;      // of `width` elements that a thread has in a tile; 0: the row is too long for
                      // registers and is read again by each nest
  int64_t tiles = 1;  // into which the columns are cut
  int64_t unit_rows = 1;   // that a unit takes, one after the other
  std::vector<bool> held;  // by instruction: loads that wait in registers for a later nest

  int block_threads() const { return threads == 32 ? 256 : threads; }
  int64_t groups_of_rows() const { return (rows + unit_rows - 1) / unit_rows; }
  int64_t units() const { return groups_of_rows() * tiles; }
  /// Blocks of the first kernel.
  int64_t blocks() const;
};

/// Threads of a block of the second kernel; it takes so many columns, in so many groups of units.
inline constexpr int kFinishColumns = 32, kFinishGroups = 8;

/// Returns null where CUDA C++ cannot be printed: for a reduction over only some of the inner
/// loops, and for sums over rows together with reductions inside rows that are too long for
/// registers.
std::optional<GpuLayout> make_gpu_layout(const Schedule& s);

/// Whether `a` is read or written in packs.
bool in_packs(const Schedule& s, const GpuLayout& layout, const Access& a);
/// The values that nest `nest` computes for each element, operands first.
std::vector<InstrId> element_values(const Schedule& s, const Nest& nest);

/// Where the partial results of a sum over rows begin in scratch: a total has one for each unit,
/// sums of columns have one for each column and group of rows.
size_t gpu_scratch_offset(const Schedule& s, const GpuLayout& layout, InstrId reduction);
size_t gpu_scratch_bytes(const Schedule& s, const GpuLayout& layout);

}  // namespace tessera::compiler
