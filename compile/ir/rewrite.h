// The tools that passes share: which node makes each value, which nodes read it, what happens to
// each memory, and a way to replace values by others. Invariant: after apply() the graph can be
// printed and verified again, and its values are numbered in the order in which they are defined.
#pragma once
#include <string_view>
#include <vector>

#include "compile/ir/graph.h"
#include "core/dispatch/call.h"

namespace tessera::compiler {

/// For each value: the node that defines it (kNoNode: it is an input or a shape), the nodes that
/// read or overwrite it, in order, and whether it is an output.
inline constexpr int32_t kNoNode = -1;
struct Uses {
  explicit Uses(const Graph& graph);
  std::vector<int32_t> producer;
  std::vector<std::vector<int32_t>> readers;
  std::vector<bool> output;
};

/// What happens to one memory, the values with one `buffer`.
struct MemoryUse {
  bool external = false;        // existed before the graph runs
  int outputs = 0;              // values in it that are outputs
  int32_t last_read = kNoNode;  // the number of nodes, if an output lives in it
  std::vector<int32_t> writes;  // effects, in order
};
/// The uses of each memory, by buffer.
std::vector<MemoryUse> memory_uses(const Graph& graph);

/// Replaces values. A replacement may lie in other memory, since apply() lays out views and results
/// of effects anew, but it has the shape, strides and dtype of what it replaces.
class Rewrite {
 public:
  explicit Rewrite(Graph& graph);
  /// The value that replaces `id` so far, or `id` itself.
  ValueId now(ValueId id) const;
  void replace(ValueId id, ValueId by) { by_[size_t(id)] = by; }
  /// Replaces `id` by `by`, from which node `at` makes it, if removing the node changes nothing
  /// that can be observed. This requires that `id` has memory of its own that is never written,
  /// that the memory of `by` is not written while `id` is still read, that no output begins to
  /// share memory with anything, and that layouts are equal.
  bool try_alias(ValueId id, ValueId by, int32_t at);
  /// Updates operands, destinations and outputs, drops nodes without an op and unused shapes and
  /// values, and renumbers what is left.
  void apply();

 private:
  Graph& graph_;
  std::vector<ValueId> by_;
  std::vector<MemoryUse> memory_;
};

/// Types and strides that the eager backend would give the results of an op that makes its own
/// memory.
Metas planned_results(const PrimRef& prim, std::span<const Tensor> in);
/// Returns a tensor without memory that has the layout of a value.
Tensor shape_of(const Graph& graph, ValueId id);
/// True where the node is this op and its results have memory of their own.
bool is(const Node& node, std::string_view op);
/// Calls f(k) for each node k that is this op, in their order; f may replace nodes.
template <class F>
void for_each(const Graph& graph, std::string_view op, F f) {
  for (int32_t k = 0; k < int32_t(graph.nodes.size()); ++k)
    if (is(graph.nodes[size_t(k)], op)) f(k);
}
/// The node that makes `id` where it is this op, as is() has it; else kNoNode.
int32_t maker(const Graph& graph, const Uses& uses, ValueId id, std::string_view op);
/// True where the node writes memory that existed before it.
bool is_effect(const Node& node);
/// True where no node between nodes `from` and `to` writes memory of the operands of `node`.
bool operands_unchanged(const Graph& graph, const Node& node, int32_t from, int32_t to);

}  // namespace tessera::compiler
