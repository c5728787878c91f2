#include "compile/ir/interpreter.h"

#include "core/dispatch/target.h"

namespace tessera::compiler {
namespace {

// For each value, the last node that reads it.
std::vector<size_t> last_reads(const Graph& g) {
  std::vector<size_t> last(g.values.size(), 0);
  for (size_t k = 0; k < g.nodes.size(); ++k) {
    for (ValueId id : g.nodes[k].out) last[size_t(id)] = k;
    for (auto* list : {&g.nodes[k].in, &g.nodes[k].into})
      for (ValueId id : *list)
        if (id != kNoValue) last[size_t(id)] = k;
  }
  for (ValueId id : g.outputs) last[size_t(id)] = g.nodes.size();
  return last;
}

// The stride of a dim of extent 1 has no meaning and is not compared.
bool same_strides(const Meta& a, const Meta& b) {
  for (int d = 0; d < a.shape.size(); ++d)
    if (a.shape[d] > 1 && a.strides[d] != b.strides[d]) return false;
  return true;
}

}  // namespace

void check_inputs(std::string_view who, const Graph& g, std::span<const Tensor> inputs) {
  TESSERA_CHECK_AS(ShapeError, inputs.size() == g.inputs.size(),
                   "{}: {} inputs, the graph was traced with {}", who, inputs.size(),
                   g.inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Meta &m = g[g.inputs[i]].meta, &given = inputs[i].meta();
    TESSERA_CHECK_AS(ShapeError,
                     given.shape == m.shape && given.dtype == m.dtype && given.device == m.device &&
                         same_strides(given, m),
                     "{}: input {} is {} with strides {}, the graph was traced with {}{} and {}",
                     who, i, describe(inputs[i]), tessera::to_string(given.strides),
                     name_of(m.dtype), tessera::to_string(m.shape), tessera::to_string(m.strides));
  }
}

Tensors interpret(const Graph& g, std::span<const Tensor> inputs) {
  check_inputs("interpret", g, inputs);
  EagerScope eager;
  std::vector<size_t> last = last_reads(g);
  std::vector<Tensor> value(g.values.size());
  auto at = [&](ValueId id) -> Tensor& { return value[size_t(id)]; };
  for (size_t i = 0; i < inputs.size(); ++i) at(g.inputs[i]) = inputs[i].detach();
  for (const ImplicitInput& i : g.implicit) at(i.id) = i.tensor;
  for (ValueId id : g.shapes) at(id) = Tensor(g[id].meta, nullptr);
  for (size_t k = 0; k < g.nodes.size(); ++k) {
    const Node& n = g.nodes[k];
    Tensors in, out, into;
    for (ValueId id : n.in) in.push_back(at(id));
    for (size_t i = 0; i < n.into.size(); ++i)
      into.push_back(n.into[i] == kNoValue ? empty(g[n.out[i]].meta) : at(n.into[i]));
    for (auto* list : {&n.in, &n.into})  // a result may take over what dies here
      for (ValueId id : *list)
        if (id != kNoValue && last[size_t(id)] == k) at(id) = {};
    if (n.into.empty())
      out = eager_backend().run(n.prim, in);
    else
      eager_backend().assign(into, n.prim, in), out = std::move(into);
    for (size_t i = 0; i < n.out.size(); ++i)
      if (last[size_t(n.out[i])] > k) at(n.out[i]) = std::move(out[i]);
  }
  Tensors outputs;
  for (ValueId id : g.outputs) outputs.push_back(at(id));
  return outputs;
}

}  // namespace tessera::compiler
