// The order in which generated code computes a body. Loops are outer (an index of all of them is a
// row; rows are cut into chunks, which threads share) or inner (traversed inside a row by one nest
// after the other, the last of them vectorised). A reduction over inner loops is complete before
// the nests that read it; one over rows, or over everything, is accumulated by each chunk and
// combined at the end, in the order of the chunks. Invariant: the order of every sum is a property
// of the body.
#pragma once
#include <optional>
#include <vector>

#include "compile/codegen/loops.h"
#include "core/base/boundaries.h"

namespace tessera::compiler {

/// Elements that a sum takes in interleaved lanes of its own precision before they meet in double.
inline constexpr int64_t kSumBlock = limit("generated.sum_block");
inline constexpr int kMaxLanes = limit("generated.lanes");
/// Where a loop reads or writes elements of one byte as well: GCC takes vectors of as many bytes as
/// there are lanes for all that it does.
inline constexpr int kMaxLanesOfBytes = limit("generated.byte_lanes");
/// Elements of a row from which on its results are streamed.
inline constexpr int64_t kStreamedRow = limit("streams.row");
/// Rows after which sums over rows move from single to double precision.
inline constexpr int64_t kSumRows = limit("generated.sum_rows");

enum class Place : uint8_t {
  kHead,     // once for each chunk: varies with no loop
  kRow,      // once for each row
  kElement,  // in nests
  kLate,     // once all chunks are done: sums over rows and what follows from them
};
// kPick: sum(where(index == v, x, 0)) over a row is the element of x that v says.
enum class ReduceAs : uint8_t { kNone, kRow, kPick, kChunk };

struct Placed {
  Place place = Place::kHead;
  int stage = 0;  // nests of stages below it come first
  ReduceAs reduce = ReduceAs::kNone;
  bool used = false;
  bool buffered = false;  // kept for the whole row when first computed
  int kept_in = -1;       // the result in whose row it waits until that is written; -1: a buffer
};

/// Loops over the inner loops of `loops` that compute values and feed them to reductions and
/// results.
struct Nest {
  LoopMask loops = 0;
  int stage = 0;
  std::vector<InstrId> values = {};      // computed here, operands first
  std::vector<InstrId> reread = {};      // from buffers
  std::vector<InstrId> reductions = {};  // that elements are fed to
  std::vector<int> stores = {};
};

/// An operand that nest `nest` fetches, into a cache of that level, so many elements before it
/// reads them. There may be one of each level for an operand.
struct Ahead {
  int operand = 0, nest = 0;
  int64_t elements = 0;
  int level = 1;
};

/// A softmax of long rows (compile/codegen/softmax.h): exponentials and sums of pieces of `size`
/// elements below the maximum of the piece, so that nests 0 and 1 work on one row.
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
  bool beside = false;  // nest k works on the row k before that of the first, in one loop with it
  Pieces pieces;      // then nest 1 works on the row of the first, and those after it one row less
                      // behind
  int64_t block = 0;  // > 0: rows are pieces of so many elements of the innermost loop
  int64_t rows = 1, chunk_rows = 1;

  int loops() const { return int(body.extents.size()); }
  LoopMask outer_mask() const { return (LoopMask(1) << outer) - 1; }
  LoopMask inner_mask() const { return ((LoopMask(1) << loops()) - 1) & ~outer_mask(); }
  int64_t chunks() const { return (rows + chunk_rows - 1) / chunk_rows; }
  /// Elements that the loops of `mask` have together.
  int64_t count(LoopMask mask) const;
  /// Whether a value is a bool that lies next to those of the neighbouring elements, which loops in
  /// lanes find widened.
  bool widened(const Nest& n, InstrId id) const;
  /// Whether others of one byte are read or written there, which decides how many lanes it has.
  bool touches_bytes(const Nest& n) const;
  const Instr& instr(InstrId id) const { return body.instrs[size_t(id)]; }
  const Placed& at(InstrId id) const { return values[size_t(id)]; }
};

enum class Target : uint8_t { kCpu, kCuda };

/// Null when no order that generated code supports computes `body`. A CPU streams results
/// (compile/codegen/streams.h) and picks elements, which a block of threads has no use for.
std::optional<Schedule> make_schedule(const Body& body, Target target = Target::kCpu);

/// Partial results of reductions over rows: bytes of one chunk, of all, and where in the bytes of
/// its chunk a reduction has its own.
int64_t chunk_scratch_bytes(const Schedule& s);
int64_t scratch_offset(const Schedule& s, InstrId reduction);
int64_t scratch_bytes(const Schedule& s);

}  // namespace tessera::compiler
