// Removes dead code, going backwards from the end: live is what is needed by an output, by a
// collective, or by an effect on memory that is still read.
#include "compile/ir/rewrite.h"
#include "compile/passes/passes.h"

namespace tessera::compiler {

void eliminate_dead_code(Graph& g) {
  std::vector<bool> needed(g.values.size()), buffer_needed(g.values.size());
  auto need = [&](ValueId id) {
    needed[size_t(id)] = true;
    if (g[id].buffer != kNoBuffer) buffer_needed[size_t(g[id].buffer)] = true;
  };
  for (ValueId id : g.outputs) need(id);
  for (ValueId id : g.inputs) buffer_needed[size_t(id)] = true;
  for (const ImplicitInput& i : g.implicit) buffer_needed[size_t(i.id)] = true;
  for (size_t k = g.nodes.size(); k-- > 0;) {
    Node& n = g.nodes[k];
    bool live = n.role == Role::kCollective;
    for (ValueId id : n.out) live = live || needed[size_t(id)];
    for (ValueId id : n.into)
      live = live || (id != kNoValue && buffer_needed[size_t(g[id].buffer)]);
    if (!live) {
      n.prim = {};
      continue;
    }
    for (ValueId id : n.in) need(id);
    for (ValueId id : n.into)
      if (id != kNoValue) need(id);
  }
  Rewrite(g).apply();
}

}  // namespace tessera::compiler
