#include "compile/run/collective_order.h"

namespace tessera::compiler {

CallOrderScope::List collective_orders(const Graph& graph) {
  std::vector<std::pair<const ProcessGroup*, Ref<CallOrder>>> lists;
  for (const Node& n : graph.nodes) {
    if (!is_collective(*n.prim)) continue;
    const ProcessGroup* group = &group_of(*n.prim);
    auto list = std::ranges::find(lists, group, [](auto& l) { return l.first; });
    if (list == lists.end()) list = lists.insert(list, {group, Ref<CallOrder>(new CallOrder)});
    list->second->calls.push_back(hash_collective(*n.prim, graph[n.in[0]].meta));
    list->second->names.push_back(to_string(graph, n));
  }
  return {lists.begin(), lists.end()};
}

}  // namespace tessera::compiler
