// The analysis that fusion works on. Nodes are of three kinds: those that fused kernels can be made
// of, those that cost nothing and are placed wherever they are read (views, numbers), and the
// others. Invariant: dependences are between nodes that compute and look through the free ones; the
// graph may be emitted in any order that respects them.
#pragma once
#include <vector>

#include "compile/ir/rewrite.h"

namespace tessera::compiler {

enum class NodeKind : uint8_t {
  kOther,
  kFusible,      // elementwise ops, copies, reductions, effects of them
  kTransparent,  // views that loops pass through
  kOpaque,       // other views
  kNumber,       // `full` and `arange` in memory that is never written
};

enum class Recompute : uint8_t {
  kNever,
  kOtherPhase,  // backward makes it again from memory that is kept anyway: a bias added
  kAlways,      // functions of numbers alone: masks by position
};

struct Dataflow {
  /// Nodes marked in `kept` are not computed again.
  explicit Dataflow(const Graph& graph, const std::vector<bool>& kept = {});

  bool is_free(int32_t node) const { return kind[size_t(node)] >= NodeKind::kTransparent; }
  /// Whether the fusible node `reader` computes the result of node `producer` itself instead of
  /// reading it.
  bool is_inlined(int32_t producer, int32_t reader) const;
  /// Returns the node that makes operand `id` of `reader` if it is inlined there, else kNoNode.
  int32_t inlined(ValueId id, int32_t reader) const {
    int32_t m = producer[size_t(behind_views(id))];
    return is_inlined(m, reader) ? m : kNoNode;
  }
  /// Whether some node reads what `node` makes, or `node` has an effect.
  bool is_needed(int32_t node) const;
  /// Returns what `id` is a transparent view of, or `id`.
  ValueId behind_views(ValueId id) const;
  /// Returns the node that made the state of memory that `id` sees, past all views; kNoNode for an
  /// input.
  int32_t source(ValueId id) const;

  const Graph& graph;
  // By node.
  std::vector<NodeKind> kind;
  std::vector<Recompute> recompute;
  std::vector<AxisMap> axes;                 // of fusible nodes and transparent views
  std::vector<std::vector<int32_t>> before;  // nodes that have to run before it
  std::vector<std::vector<int32_t>> after;   // nodes that have to run after it
  // By value.
  std::vector<int32_t> producer;
  std::vector<std::vector<int32_t>> readers;  // nodes that read or overwrite it or views of it
  std::vector<bool> is_output;                // it or a view of it

 private:
  bool is_view(int32_t node) const;
  void classify();
  void choose_recomputed(const std::vector<bool>& kept);
  Recompute may_recompute(int32_t node, const std::vector<std::vector<int32_t>>& direct) const;
  void add_dependences();

  std::vector<bool> written_;  // by buffer
};

}  // namespace tessera::compiler
