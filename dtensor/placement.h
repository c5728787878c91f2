// How a tensor is laid out over the ranks of a mesh: one placement for each mesh axis. Two layouts
// are equivalent when they give every rank the same box, even if their placements differ. Where
// several axes cut one dim, the LAST axis cuts first and earlier axes cut its pieces, so that
// gathering over an earlier axis (FSDP's) leaves a plain shard over a later one (TP's).
#pragma once
#include <span>
#include <string>

#include "collectives/process_group.h"
#include "core/base/function_ref.h"
#include "core/base/small_vector.h"
#include "core/tensor/shape.h"

namespace tessera {

/// The error that a layout is impossible, or that an op cannot run on the layouts of its operands.
/// The text names the op, the layouts and the redistribute() that would help.
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
/// Pieces have the same number of units, rounded up, so the last ones may be smaller or empty. A
/// `unit` is the number of indices that must stay together: the width of a head in a dim of heads x
/// width.
inline Placement Shard(int dim, int64_t unit = 1) {
  return {Placement::kShard, ReduceOp::kSum, dim, unit};
}
inline Placement Partial(ReduceOp op = ReduceOp::kSum) { return {Placement::kPartial, op, -1, 1}; }

/// One placement for each mesh axis.
using Layout = SmallVector<Placement, 3>;
/// "(Shard(0), Replicate)".
std::string to_string(const Placement& p);
std::string to_string(const Layout& layout);

/// The part of a tensor that one rank holds: a range of each dim.
using Box = SmallVector<Range, 4>;
Shape shape_of(const Box& box);

/// The number of ranks along each mesh axis, or a rank's coordinate along each.
using Coordinates = SmallVector<int, 3>;

/// The box of the rank at `coordinate` on a mesh of `sizes`. Throws ShardingError when the layout
/// does not fit the shape: a dim does not exist, or units do not divide what they cut.
Box box_of(const Shape& global, const Layout& layout, const Coordinates& sizes,
           const Coordinates& coordinate);
/// True when box_of works for every rank.
bool fits(const Shape& global, const Layout& layout, const Coordinates& sizes);
/// True when both layouts fit and give every rank the same box.
bool same_boxes(const Shape& global, const Layout& a, const Layout& b, const Coordinates& sizes);
/// Calls f(coordinate) for every rank of a mesh, last axis fastest, until it returns false. Returns
/// true when it never did.
bool for_all_ranks(const Coordinates& sizes, FunctionRef<bool(const Coordinates&)> f);

}  // namespace tessera
