// Writing ops into a graph without running them: how passes make nodes with the functions that
// users call. Invariant: what is written has the layouts that running it would give.
#pragma once
#include <unordered_map>
#include <vector>

#include "compile/ir/graph.h"
#include "core/base/function_ref.h"
#include "core/dispatch/target.h"

namespace tessera::compiler {

/// While it lives, ops of this thread are appended to `nodes` (their values to the graph), with the
/// phase and scope of `like`. Layers see nothing.
class NodeWriter final : private Backend {
 public:
  NodeWriter(Graph& graph, std::vector<Node>& nodes, const Node& like);
  /// Stands for a value of the graph.
  Tensor tensor(ValueId id);
  /// The value that `t`, made by tensor() or by an op since, stands for.
  ValueId value(const Tensor& t) const;

 private:
  Tensors run(const PrimRef& prim, Inputs in) override;
  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override;

  Graph& graph_;
  std::vector<Node>& nodes_;
  Phase phase_;
  int32_t scope_;
  std::unordered_map<const TensorImpl*, ValueId> ids_;
  std::vector<Tensor> held_;  // so that no handle is made twice at one address
  std::unordered_map<ValueId, Ref<Storage>> memory_;
  BackendScope recording_;
  Scoped<LayerMask> no_layers_;
};

/// The op behind a function of one result: prim_of([] { return full({2}, 1.0); }).
PrimRef prim_of(FunctionRef<Tensor()> call);
/// The same, of one operand that lies as `meta` says.
PrimRef prim_of(const Meta& meta, FunctionRef<Tensor(const Tensor&)> call);

}  // namespace tessera::compiler
