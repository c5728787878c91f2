// Loops of several ops made one. Invariant: a loop stands for itself, for another one, or for an
// ordered product of others, outermost first; unify only ever refines that.
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
  /// The loops that `p` is made of now; those of extent 1 are left out.
  Product leaves(const Product& p) const;
  /// Makes two products one: [6] with [2, 3] splits the 6. False, and the loops are of no use any
  /// more, where extents have no common refinement in order.
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
