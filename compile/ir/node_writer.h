// Writes ops into a graph without running them, so that passes make nodes with the functions that
// users call. Invariant: a written value has the layout that running the op would give.
#pragma once
#include <unordered_map>
#include <vector>

#include "compile/ir/graph.h"
#include "core/base/function_ref.h"
#include "core/dispatch/target.h"

namespace tessera::compiler {

/// While an object of this class lives, ops of its thread are appended to `nodes` and their values
/// to the graph, with the phase and scope of `like`. Layers such as autograd do not see them.
class NodeWriter final : private Backend {
 public:
  NodeWriter(Graph& graph, std::vector<Node>& nodes, const Node& like);
  /// Returns a tensor that stands for a value of the graph.
  Tensor tensor(ValueId id);
  /// Returns the value that `t` stands for. `t` was made by tensor() or by an op since.
  ValueId value(const Tensor& t) const;

 private:
  Tensors run(const PrimRef& prim, Inputs in) override;
  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override;

  Graph& graph_;
  std::vector<Node>& nodes_;
  Phase phase_;
  int32_t scope_;
  std::unordered_map<const TensorImpl*, ValueId> ids_;
  std::vector<Tensor> held_;  // keeps handles alive, so that no address is used twice
  std::unordered_map<ValueId, Ref<Storage>> memory_;
  BackendScope recording_;
  Scoped<LayerMask> no_layers_;
};

/// Returns the op behind a function with one result: prim_of([] { return full({2}, 1.0); }).
PrimRef prim_of(FunctionRef<Tensor()> call);
/// Does the same for a function of one operand with the layout `meta`.
PrimRef prim_of(const Meta& meta, FunctionRef<Tensor(const Tensor&)> call);

}  // namespace tessera::compiler
