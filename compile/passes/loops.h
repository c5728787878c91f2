// Unifies the loops of several ops. Invariant: a loop stands for itself, for another loop, or for
// an ordered product of others, outermost first, and unify only refines that.
#pragma once
#include <optional>
#include <vector>

#include "core/base/small_vector.h"

namespace tessera::compiler {

/// An ordered product of loops, outermost first; empty: extent 1.
using Product = SmallVector<int, 3>;
/// One product for each dim of a tensor.
using DimProducts = SmallVector<Product, 4>;

class Loops {
 public:
  int add(int64_t extent);
  int64_t extent(int loop) const { return loops_[size_t(loop)].extent; }
  /// Returns the loops that `p` is made of now, without those of extent 1.
  Product leaves(const Product& p) const;
  /// Makes two products equal: [6] with [2, 3] splits the 6. Returns false where the extents have
  /// no common refinement in order; the loops cannot be used any more then.
  bool unify(const Product& a, const Product& b);
  bool unify(const DimProducts& a, const DimProducts& b);

 private:
  struct Loop {
    int64_t extent;
    Product parts;  // what it stands for; empty: itself
  };
  void leaves(int loop, Product& out) const;
  // Splits a leaf; returns the outer and inner part.
  std::pair<int, int> split(int loop, int64_t inner);

  std::vector<Loop> loops_;
};

}  // namespace tessera::compiler
