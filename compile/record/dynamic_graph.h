// One graph for many sizes: two graphs that differ only in numbers become one graph that is linear
// in one size. Every extent and integer attribute is a value on the line through the two that were
// recorded; strides and offsets follow from the ops. Invariant: at() runs shape inference of every
// op anew and returns no graph in which it disagrees with a line.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "compile/ir/attributes.h"
#include "compile/ir/graph.h"

namespace tessera::compiler {

/// The value at `size` on the line through (size_a, a) and (size_b, b); throws ShapeError where it
/// is no integer.
struct Line {
  int64_t size_a, size_b;
  int64_t at(int64_t a, int64_t b, int64_t size) const;
  /// The same for real numbers that are integers, or reciprocals of integers; nothing for other
  /// numbers, unless they are equal.
  std::optional<double> at(double a, double b, int64_t size) const;
  /// True when a and b leave no doubt about the line: they are equal, in proportion to the sizes,
  /// or differ from the sizes by the same constant.
  bool certain(int64_t a, int64_t b) const;
};

class DynamicGraph {
 public:
  /// Returns the graph that is `a` at size_a and `b` at size_b; nothing where there is none, and
  /// *why then says what differs.
  static std::optional<DynamicGraph> unify(const Graph& a, int64_t size_a, const Graph& b,
                                           int64_t size_b, std::string* why);
  /// True when two sizes determine every attribute that differs: it is in proportion to the size or
  /// differs from it by a constant. Otherwise a third recording should confirm the graph.
  bool certain() const;
  /// Returns the graph at `size`. Throws ShapeError where ops do not accept it.
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

/// Computes metas, offsets and memories of the results of every node from its op and from the metas
/// of inputs, implicit inputs and shapes.
void lay_out_values(Graph& graph);

}  // namespace tessera::compiler
