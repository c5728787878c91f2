// The order in which generated code computes a body. Loops are outer or inner. The indices of all
// outer loops together are a row; rows are cut into chunks, which threads share. Inner loops are
// traversed inside a row by one nest after the other, the last of them vectorised. A reduction over
// inner loops is complete before the nests that read it; one over rows, or over everything, is
// accumulated by each chunk and combined at the end, in the order of the chunks. Invariant: the
// order of every sum is a property of the body, not of the number of threads.
#pragma once
#include <optional>
#include <vector>

#include "compile/codegen/loops.h"
#include "core/base/boundaries.h"

namespace tessera::compiler {

/// The number of elements that are summed in interleaved lanes of their own precision before the
/// lanes are combined in double.
inline constexpr int64_t kSumBlock = limit("generated.sum_block");
inline constexpr int kMaxLanes = limit("generated.lanes");
/// The most lanes of a loop that also reads or writes one-byte elements: GCC then uses vectors of
/// as many bytes as there are lanes for everything in the loop.
inline constexpr int kMaxLanesOfBytes = limit("generated.byte_lanes");
/// The least row length, in elements, from which on results are streamed.
inline constexpr int64_t kStreamedRow = limit("streams.row");
/// The number of rows after which sums over rows move from single to double precision.
inline constexpr int64_t kSumRows = limit("generated.sum_rows");

enum class Place : uint8_t {
  kHead,     // once for each chunk: varies with no loop
  kRow,      // once for each row
  kElement,  // in nests
  kLate,     // once all chunks are done: sums over rows and what follows from them
};
// kPick: sum(where(index == v, x, 0)) over a row is computed by reading the element of x at index
// v.
enum class ReduceAs : uint8_t { kNone, kRow, kPick, kChunk };

struct Placed {
  Place place = Place::kHead;
  int stage = 0;  // nests of stages below it come first
  ReduceAs reduce = ReduceAs::kNone;
  bool used = false;
  bool buffered = false;  // kept for the whole row when first computed
  int kept_in = -1;       // the result in whose row it waits until that is written; -1: a buffer
};

/// A nest of loops over the inner loops in `loops` that computes values and passes them to
/// reductions and results.
struct Nest {
  LoopMask loops = 0;
  int stage = 0;
  std::vector<InstrId> values = {};      // computed here, operands first
  std::vector<InstrId> reread = {};      // from buffers
  std::vector<InstrId> reductions = {};  // that elements are fed to
  std::vector<int> stores = {};
};

/// Says that nest `nest` prefetches an operand, `elements` before it reads them, into the cache of
/// `level`. An operand may have one of these for each level.
struct Ahead {
  int operand = 0, nest = 0;
  int64_t elements = 0;
  int level = 1;
};

/// A softmax of long rows (compile/codegen/softmax.h) in pieces of `size` elements: exponentials
/// and sums are first taken below the maximum of the piece, so nests 0 and 1 work on one row.
struct Pieces {
  InstrId max = -1, sum = -1;
  int64_t size = 0;  // 0: there are none
};

struct Schedule {
  Body body;      // loops of extent 1 dropped, reordered and merged; outer ones first
  int outer = 0;  // loops [0, outer)
  std::vector<Placed> values;
  std::vector<Nest> nests;
  std::vector<int> row_stores, late_stores;
  std::vector<InstrId> row_reductions;  // that values of rows are fed to
  std::vector<bool> streamed;           // results that are stored past the caches
  std::vector<Ahead> ahead;
  bool beside = false;  // nest k works on the row k before the first nest's, in one loop
  Pieces pieces;      // then nest 1 works on the row of the first, and those after it one row less
                      // behind
  int64_t block = 0;  // > 0: rows are pieces of so many elements of the innermost loop
  int64_t rows = 1, chunk_rows = 1;

  int loops() const { return int(body.extents.size()); }
  LoopMask outer_mask() const { return (LoopMask(1) << outer) - 1; }
  LoopMask inner_mask() const { return ((LoopMask(1) << loops()) - 1) & ~outer_mask(); }
  int64_t chunks() const { return (rows + chunk_rows - 1) / chunk_rows; }
  /// The product of the extents of the loops in `mask`.
  int64_t count(LoopMask mask) const;
  /// True if the value is a bool that is contiguous in memory with those of the neighbouring
  /// elements: loops in lanes get it widened to an int.
  bool widened(const Nest& n, InstrId id) const;
  /// True if the nest reads or writes other one-byte elements, which limits its number of lanes.
  bool touches_bytes(const Nest& n) const;
  const Instr& instr(InstrId id) const { return body.instrs[size_t(id)]; }
  const Placed& at(InstrId id) const { return values[size_t(id)]; }
};

enum class Target : uint8_t { kCpu, kCuda };

/// Returns null when generated code supports no order that computes `body`. Only schedules for a
/// CPU stream results (compile/codegen/streams.h) and pick elements; a block of threads has no use
/// for it.
std::optional<Schedule> make_schedule(const Body& body, Target target = Target::kCpu);

/// Partial results of reductions over rows: the bytes of one chunk, the bytes of all chunks, and
/// the offset of a reduction in the bytes of its chunk.
int64_t chunk_scratch_bytes(const Schedule& s);
int64_t scratch_offset(const Schedule& s, InstrId reduction);
int64_t scratch_bytes(const Schedule& s);

}  // namespace tessera::compiler
