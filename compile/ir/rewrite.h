// What passes share: who makes and reads each value, what happens to each memory, and the exchange
// of values for others. Invariant: after apply() the graph prints and verifies again, with its
// values numbered in the order in which they are defined.
#pragma once
#include <vector>

#include "compile/ir/graph.h"
#include "core/dispatch/call.h"

namespace tessera::compiler {

/// By value: the node that defines it (kNoNode: inputs and shapes), the nodes that read or
/// overwrite it, in order, and whether it is an output.
inline constexpr int32_t kNoNode = -1;
struct Uses {
  explicit Uses(const Graph& graph);
  std::vector<int32_t> maker;
  std::vector<std::vector<int32_t>> readers;
  std::vector<bool> output;
};

/// What happens to one memory, the values with one `buffer`.
struct MemoryUse {
  bool external = false;        // existed before the graph runs
  int outputs = 0;              // values in it that are outputs
  int32_t last_read = kNoNode;  // number of nodes where an output lives in it
  std::vector<int32_t> writes;  // effects, in order
};
/// By buffer.
std::vector<MemoryUse> memory_uses(const Graph& graph);

/// Replaces values. Views and results of effects are laid out anew by apply(), so a replacement may
/// lie elsewhere, but it has the shape, strides and dtype of what it replaces.
class Rewrite {
 public:
  explicit Rewrite(Graph& graph);
  /// The value that `id` reads as now.
  ValueId now(ValueId id) const;
  void replace(ValueId id, ValueId by) { by_[size_t(id)] = by; }
  /// As replace, if the node number `at`, which makes `id` from `by`, may vanish: nobody can tell
  /// whether the two share memory. That is, `id` has memory of its own that is never written, that
  /// of `by` is not written while `id` is still read, no output begins to share memory with
  /// anything, and layouts are equal.
  bool try_alias(ValueId id, ValueId by, int32_t at);
  /// Rewires operands, destinations and outputs, drops nodes without an op, unused shapes and
  /// values, and numbers what is left.
  void apply();

 private:
  Graph& graph_;
  std::vector<ValueId> by_;
  std::vector<MemoryUse> memory_;
};

/// Types and strides of the results of an op that makes its memory, as the eager backend lays them
/// out.
Metas planned_results(const PrimRef& prim, std::span<const Tensor> in);
/// A tensor that stands for a value: its layout without memory.
Tensor shape_of(const Graph& graph, ValueId id);
/// True where the node writes memory that existed before it.
bool is_effect(const Node& node);

}  // namespace tessera::compiler
