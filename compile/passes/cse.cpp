// Eliminates common subexpressions. Constants and views are shared wherever they are. Other ops are
// shared only within a phase: a value of the forward pass that is kept for the backward pass costs
// memory and two passes over it, and what can be computed again without that is computed again
// where it is read.
#include <unordered_map>

#include "compile/ir/rewrite.h"
#include "compile/passes/passes.h"

namespace tessera::compiler {
namespace {

bool may_share(const Node& n) {
  return n.into.empty() && n.role != Role::kCollective && !n.prim->draws();
}

uint64_t hash_of(const Node& n, const ValueIds& in) {
  uint64_t h = hash_primitive(*n.prim);
  for (ValueId id : in) h = (h ^ uint64_t(id)) * 0x9e3779b97f4a7c15ull;
  return h;
}

}  // namespace

void eliminate_common_subexpressions(Graph& g) {
  Rewrite rewrite(g);
  std::unordered_map<uint64_t, std::vector<int32_t>> seen;
  for (size_t k = 0; k < g.nodes.size(); ++k) {
    Node& n = g.nodes[k];
    if (!may_share(n)) continue;
    for (ValueId& id : n.in) id = rewrite.now(id);
    std::vector<int32_t>& same_hash = seen[hash_of(n, n.in)];
    bool shared = false;
    for (int32_t e : same_hash) {
      const Node& earlier = g.nodes[size_t(e)];
      bool anywhere = n.role == Role::kConstant || n.role == Role::kView;
      if (!(earlier.in == n.in) || !same_primitive(*earlier.prim, *n.prim)) continue;
      if (earlier.phase != n.phase && !anywhere) continue;
      shared = true;
      for (size_t i = 0; i < n.out.size(); ++i) {
        if (n.prim->is_view())
          rewrite.replace(n.out[i], earlier.out[i]);
        else
          shared = rewrite.try_alias(n.out[i], earlier.out[i], e) && shared;
      }
      break;
    }
    if (shared)
      n.prim = {};
    else
      same_hash.push_back(int32_t(k));
  }
  rewrite.apply();
}

}  // namespace tessera::compiler
