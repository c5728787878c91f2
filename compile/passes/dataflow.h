// What fusion knows of a graph. Nodes are of three kinds: those that fused kernels can be made of,
// those that cost nothing and stand wherever they are read (views, numbers), and the others.
// Invariant: dependences hold between nodes that compute, past the free ones; a graph may be
// emitted in any order that keeps them.
#pragma once
#include <vector>

#include "compile/graph.h"

namespace tessera::compile {

enum class NodeKind : uint8_t {
  kOther,
  kFusible,      // elementwise ops, copies, reductions, effects of them
  kTransparent,  // views that loops pass through
  kOpaque,       // other views
  kNumber,       // `full` and `arange` in memory that is never written
};

struct Dataflow {
  explicit Dataflow(const Graph& graph);

  bool is_free(int32_t node) const { return kind[size_t(node)] >= NodeKind::kTransparent; }
  /// The node that made the memory state that `id` sees: past all views. kNoNode: an input.
  int32_t source(ValueId id) const;

  const Graph& graph;
  // By node.
  std::vector<NodeKind> kind;
  std::vector<AxisMap> axes;                 // of fusible nodes and transparent views
  std::vector<std::vector<int32_t>> before;  // nodes that have to run before it
  std::vector<std::vector<int32_t>> after;   // nodes that have to run after it
  // By value.
  std::vector<int32_t> maker;
  std::vector<std::vector<int32_t>> readers;  // nodes that read or overwrite it or views of it
  std::vector<bool> is_output;                // it or a view of it
};

}  // namespace tessera::compile
