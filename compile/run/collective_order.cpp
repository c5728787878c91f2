#include "compile/run/collective_order.h"

namespace tessera::compiler {

Announcing::List announcements_of(const Graph& graph) {
  std::vector<std::pair<const ProcessGroup*, Ref<Announcement>>> lists;
  for (const Node& n : graph.nodes) {
    if (!is_collective(*n.prim)) continue;
    const ProcessGroup* group = &group_of(*n.prim);
    auto list = std::ranges::find(lists, group, [](auto& l) { return l.first; });
    if (list == lists.end())
      list = lists.insert(list, {group, Ref<Announcement>(new Announcement)});
    list->second->calls.push_back(hash_collective(*n.prim, graph[n.in[0]].meta));
    list->second->names.push_back(to_string(graph, n));
  }
  return {lists.begin(), lists.end()};
}

}  // namespace tessera::compiler
