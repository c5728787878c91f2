#include "compile/ir/node_writer.h"

#include "compile/ir/rewrite.h"
#include "core/dispatch/context.h"

namespace tessera::compiler {

NodeWriter::NodeWriter(Graph& graph, std::vector<Node>& nodes, const Node& like)
    : graph_(graph),
      nodes_(nodes),
      phase_(like.phase),
      scope_(like.scope),
      recording_({.backend = this, .records = true}),
      no_layers_(context().enabled, LayerMask(0)) {}

Tensor NodeWriter::tensor(ValueId id) {
  const Value& v = graph_[id];
  Ref<Storage> storage;
  if (v.buffer != kNoBuffer) {
    Ref<Storage>& memory = memory_[v.buffer];  // has no bytes; its address identifies the memory
    if (!memory) memory = Ref(new Storage(0, kMeta, cpu_allocator()));
    storage = memory;
  }
  Tensor t(v.meta, std::move(storage), v.offset);
  ids_[t.impl()] = id;
  held_.push_back(t);
  return t;
}

ValueId NodeWriter::value(const Tensor& t) const {
  auto it = ids_.find(t.impl());
  TESSERA_ASSERT(it != ids_.end(), "record: {} is no value of the graph", describe(t));
  return it->second;
}

Tensors NodeWriter::run(const PrimRef& prim, Inputs in) {
  Node node{.prim = prim, .phase = phase_, .scope = scope_};
  for (const Tensor& t : in) node.in.push_back(value(t));
  node.role = prim->is_view() ? Role::kView : in.empty() ? Role::kConstant : Role::kCompute;
  Tensors out;
  auto add = [&](const Meta& meta, int64_t offset, ValueId buffer) {
    ValueId id = ValueId(graph_.values.size());
    graph_.values.push_back({meta, offset, buffer == kNoBuffer ? id : buffer});
    node.out.push_back(id);
    out.push_back(tensor(id));
  };
  if (prim->is_view()) {
    for (const Tensor& v : prim->view(in)) add(v.meta(), v.offset(), graph_[node.in[0]].buffer);
  } else {
    for (const Meta& m : planned_results(prim, in)) add(m, 0, kNoBuffer);
  }
  nodes_.push_back(std::move(node));
  return out;
}

void NodeWriter::assign(std::span<const Tensor>, const PrimRef& prim, Inputs) {
  throw BugError(
      fmt::format("record: {} writes memory; passes write effects themselves", prim->name()));
}

namespace {

PrimRef last_prim(const Meta* meta, FunctionRef<Tensor(const Tensor&)> call) {
  Graph graph;
  std::vector<Node> nodes;
  Tensor operand;
  NodeWriter writer(graph, nodes, {});
  if (meta) {
    graph.values.push_back({*meta, 0, 0});
    operand = writer.tensor(0);
  }
  Tensor result = call(operand);
  TESSERA_ASSERT(nodes.size() == 1, "record: {} ops where one was expected", nodes.size());
  return nodes[0].prim;
}

}  // namespace

PrimRef prim_of(FunctionRef<Tensor()> call) {
  return last_prim(nullptr, [&](const Tensor&) { return call(); });
}
PrimRef prim_of(const Meta& meta, FunctionRef<Tensor(const Tensor&)> call) {
  return last_prim(&meta, call);
}

}  // namespace tessera::compiler
