// Derives from an op's axis map how it runs on sharded operands. Over one mesh axis there are few
// ways: every rank does all of the op, one of its loops is split, or terms of a sum pass through an
// op that is linear. Mesh axes choose one after the other; the choice is cached by op with
// attributes, metas and layouts.
#pragma once
#include <memory>

#include "core/primitive/primitive.h"
#include "dtensor/bounded_cache.h"
#include "dtensor/placement.h"

namespace tessera {

/// One way to run an op over one mesh axis.
struct Strategy {
  SmallVector<Placement, 4> in;   // the placement that each operand must have
  SmallVector<Placement, 2> out;  // the placement that each result then has
  int factor = -1;                // the loop that is split; -1: none
  int64_t unit = 1;               // the steps of that loop that stay together
};
/// All strategies that `map` allows. `now` are the placements of the operands, whose units are
/// those in which loops may be cut.
std::vector<Strategy> strategies(const AxisMap& map, std::span<const Placement> now);

/// What the ranks of a mesh do for one op on operands of these layouts.
struct ShardingDecision {
  PrimRef local;                 // the op that this rank runs
  SmallVector<Layout, 4> need;   // of each operand
  SmallVector<Layout, 2> out;    // of each result
  Metas results;                 // global
  SmallVector<Shape, 2> pieces;  // shapes of this rank's results
  std::string refusal;           // why this needs communication; "": it needs none
  SmallVector<int, 2> reduced;   // operands whose sums over ranks are reduced for it
  mutable bool told = false;     // it was logged that it communicates
};

/// An operand, as far as decisions depend on it.
struct Operand {
  const Meta* meta;
  const Layout* layout;
};

class DeviceMesh;
ShardingDecision decide(const PrimRef& prim, std::span<const Operand> in, const DeviceMesh& mesh);

/// The decisions of a mesh; their number is bounded.
class DecisionCache {
 public:
  /// The reference is valid until BoundedCache::kCapacity other decisions are made.
  const ShardingDecision& find(const PrimRef& prim, std::span<const Operand> in,
                               const DeviceMesh& mesh);
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    PrimRef prim;
    std::vector<Meta> metas;
    std::vector<Layout> layouts;
    ShardingDecision decision;
  };
  BoundedCache<Entry> entries_;
};

}  // namespace tessera
