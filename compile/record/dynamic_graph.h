// One graph for many sizes: two graphs that differ in numbers alone are one graph that is linear in
// one size. Every extent and integer attribute is the value on the line through the two that were
// recorded; strides and offsets follow from the ops. Invariant: at() runs shape inference of every
// op anew and gives no graph in which it disagrees with a line.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "compile/ir/attributes.h"
#include "compile/ir/graph.h"

namespace tessera::compiler {

/// The line through (size_a, a) and (size_b, b) at `size`; throws ShapeError where that is no whole
/// number.
struct Line {
  int64_t size_a, size_b;
  int64_t at(int64_t a, int64_t b, int64_t size) const;
  /// Reals that are whole, or one over whole; others must be equal, or the result is empty.
  std::optional<double> at(double a, double b, int64_t size) const;
  /// True when a and b are equal, in proportion to the sizes, or each the same constant beside
  /// them.
  bool certain(int64_t a, int64_t b) const;
};

class DynamicGraph {
 public:
  /// The graph that is `a` at size_a and `b` at size_b; nothing where there is none, and *why then
  /// says what differs.
  static std::optional<DynamicGraph> unify(const Graph& a, int64_t size_a, const Graph& b,
                                           int64_t size_b, std::string* why);
  /// True when each attribute that differs is in proportion to the size, or a constant beside it:
  /// two sizes leave no doubt then. Else a third should be looked at.
  bool certain() const;
  /// The graph at `size`. Throws ShapeError where ops do not take it.
  Graph at(int64_t size) const;

 private:
  DynamicGraph(const Graph& a, const Graph& b, Line line) : a_(a), b_(b), line_(line) {}
  std::string find_difference();
  std::string compare(size_t node);
  Meta meta_at(ValueId id, int64_t size) const;
  PrimRef prim_at(size_t node, int64_t size) const;

  struct Pair {
    Attributes a, b;
  };
  Graph a_, b_;
  Line line_;
  std::vector<std::optional<Pair>> attributes_;  // by node, where they differ
};

/// Metas, offsets and memories of the results of every node, from its ops and from the metas of
/// inputs, implicit inputs and shapes.
void lay_out_values(Graph& graph);

}  // namespace tessera::compiler
