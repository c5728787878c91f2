// How a tensor lies over the ranks of a mesh: one placement for each mesh axis. Placements are
// cuts: two layouts are the same when they give every rank the same box, whatever their words.
// Where several axes cut one dim, the LAST axis cuts first and the first axis cuts what is left, so
// that gathering over an earlier axis (FSDP's) leaves a plain shard over a later one (TP's).
#pragma once
#include <span>
#include <string>

#include "collectives/process_group.h"
#include "core/base/function_ref.h"
#include "core/base/small_vector.h"
#include "core/tensor/shape.h"

namespace tessera {

/// A layout cannot be had, or an op cannot run on the layouts of its operands. The text names the
/// op, the layouts and the redistribute() that would help.
class ShardingError : public UserError {
 public:
  using UserError::UserError;
};

/// How one mesh axis holds a tensor.
struct Placement {
  enum Kind : uint8_t {
    kReplicate,  // every rank has all of it
    kShard,      // each rank has a piece of `dim`, cut at multiples of `unit`
    kPartial     // every rank has a term of it; the whole is their reduction by `op`
  };
  Kind kind = kReplicate;
  ReduceOp op = ReduceOp::kSum;
  int dim = -1;
  int64_t unit = 1;

  bool is_replicate() const { return kind == kReplicate; }
  bool is_shard() const { return kind == kShard; }
  bool is_shard(int d) const { return kind == kShard && dim == d; }
  bool is_partial() const { return kind == kPartial; }
  bool operator==(const Placement&) const = default;
};
inline Placement Replicate() { return {}; }
/// Pieces are ceil-sized in units, so the last ones may be smaller or empty. `unit` is what must
/// stay together: the width of a head in a dim of heads x width.
inline Placement Shard(int dim, int64_t unit = 1) {
  return {Placement::kShard, ReduceOp::kSum, dim, unit};
}
inline Placement Partial(ReduceOp op = ReduceOp::kSum) { return {Placement::kPartial, op, -1, 1}; }

/// One placement per mesh axis.
using Layout = SmallVector<Placement, 3>;
/// "(Shard(0), Replicate)".
std::string to_string(const Placement& p);
std::string to_string(const Layout& layout);

/// What one rank holds of a tensor: a range of each dim.
using Box = SmallVector<Range, 4>;
Shape shape_of(const Box& box);

/// Number of ranks along each mesh axis, or a rank's place along each.
using Coordinates = SmallVector<int, 3>;

/// The box of the rank at `coordinate` on a mesh of `sizes`. Throws ShardingError when the layout
/// does not fit the shape: a dim that is not there, units that do not divide what they cut.
Box box_of(const Shape& global, const Layout& layout, const Coordinates& sizes,
           const Coordinates& coordinate);
/// True when box_of works for every rank.
bool fits(const Shape& global, const Layout& layout, const Coordinates& sizes);
/// True when both layouts fit and give every rank the same box.
bool same_boxes(const Shape& global, const Layout& a, const Layout& b, const Coordinates& sizes);
/// Calls f(coordinate) for every rank of a mesh, last axis fastest, until it returns false. True
/// when none did.
bool for_all_ranks(const Coordinates& sizes, FunctionRef<bool(const Coordinates&)> f);

}  // namespace tessera
