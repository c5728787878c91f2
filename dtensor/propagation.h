// How an op runs on sharded operands, derived from its axis map. Over one mesh axis an op can run
// in few ways: every rank does all of it, one of its loops is split, or terms of a sum pass through
// what is linear. Mesh axes choose one after the other; the choice is remembered by (op with
// attributes, metas, layouts).
#pragma once
#include <memory>

#include "core/primitive/primitive.h"
#include "dtensor/bounded_cache.h"
#include "dtensor/placement.h"

namespace tessera {

/// One way to run an op over one mesh axis.
struct Strategy {
  SmallVector<Placement, 4> in;   // what each operand must be
  SmallVector<Placement, 2> out;  // what each result then is
  int factor = -1;                // the loop that is split; -1: none
  int64_t unit = 1;               // and where it may be cut, in steps of that loop
};
/// Every way that `map` allows; `now` says where the operands are cut already, which is where loops
/// may be cut too.
std::vector<Strategy> strategies(const AxisMap& map, std::span<const Placement> now);

/// What the ranks of a mesh do with one op on operands of these layouts.
struct ShardingDecision {
  PrimRef local;                 // the op of this rank
  SmallVector<Layout, 4> need;   // of each operand
  SmallVector<Layout, 2> out;    // of each result
  Metas results;                 // global
  SmallVector<Shape, 2> pieces;  // shapes of this rank's results
  std::string refusal;           // why this takes communication; empty: it takes none
  SmallVector<int, 2> reduced;   // operands whose sums over ranks are finished for it
  mutable bool told = false;     // that it communicates
};

/// An operand as decisions see it.
struct Operand {
  const Meta* meta;
  const Layout* layout;
};

class DeviceMesh;
ShardingDecision decide(const PrimRef& prim, std::span<const Operand> in, const DeviceMesh& mesh);

/// What a mesh remembers; bounded.
class DecisionCache {
 public:
  /// The decision holds until BoundedCache::kCapacity others are made.
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
