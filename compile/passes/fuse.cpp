// Fuses nodes into kernels. Nodes are taken in order. Each joins the groups that made its operands,
// then those that read the same memory, if the result is a valid kernel and no path leads out of
// the group and back (over values, overwritten memory or collectives). So groups grow along the
// data they pass on, and a value that only its group reads never goes to memory. A group is a valid
// kernel if one sweep computes it (lower_group.h): a reduction is finished within a row, which is
// swept again while it is in a cache, or runs over all rows and is finished at the end. So a sum
// e + transpose(e) is not in the kernel that computes e. What a group writes it writes once, and
// reads, if at all, only where it writes. Views and numbers belong to no group: kernels look
// through them, and for other readers they are placed where they are read. Cheap functions of
// constants and positions, such as masks, are computed again in each kernel that reads them; in
// backward, so are values that forward made cheaply from one large value that is in memory anyway
// (a product plus a bias).
#include <algorithm>
#include <array>
#include <numeric>
#include <queue>
#include <set>

#include "compile/codegen/fused.h"
#include "compile/ir/rewrite.h"
#include "compile/passes/dataflow.h"
#include "compile/passes/kernel_name.h"
#include "compile/passes/lower_group.h"
#include "compile/passes/passes.h"

namespace tessera::compiler {
namespace {

bool inlines(const Dataflow& flow, int32_t node) {
  return std::ranges::any_of(flow.graph.nodes[size_t(node)].in,
                             [&](ValueId id) { return flow.inlined(id, node) != kNoNode; });
}

// A node that computes operands again must form a kernel by itself; if it does not, these operands
// are kept. Returns whether any was added to `kept`.
bool keep_what_is_not_inlined(const Dataflow& flow, std::vector<bool>& kept) {
  bool any = false;
  for (int32_t k = 0; k < int32_t(flow.graph.nodes.size()); ++k) {
    if (flow.is_free(k) || !inlines(flow, k) || !flow.is_needed(k)) continue;
    if (lower_group(flow, {&k, 1})) continue;
    auto keep = [&](int32_t node, auto&& self) -> void {
      for (ValueId id : flow.graph.nodes[size_t(node)].in)
        if (int32_t m = flow.inlined(id, k); m != kNoNode)
          kept[size_t(m)] = any = true, self(m, self);
    };
    keep(k, keep);
  }
  return any;
}

class Fusion {
 public:
  Fusion(Graph& g, const Dataflow& flow)
      : g_(g),
        flow_(flow),
        group_(g.nodes.size()),
        members_(g.nodes.size()),
        visited_(g.nodes.size()) {
    for (int32_t k = 0; k < int32_t(g.nodes.size()); ++k) members_[size_t(k)] = {k};
    std::iota(group_.begin(), group_.end(), 0);
    rank_ = at_rank_ = group_;
  }

  void run() {
    for (int32_t k = 0; k < int32_t(g_.nodes.size()); ++k) {
      if (flow_.kind[size_t(k)] != NodeKind::kFusible) continue;
      join_producers(k);
      for (ValueId id : g_.nodes[size_t(k)].in) join_readers(id, k);
    }
    emit();
  }

 private:
  bool is_fusible(int32_t node) const {
    return node != kNoNode && flow_.kind[size_t(node)] == NodeKind::kFusible;
  }

  // Backward's recomputations are not joined to forward nodes: their results would then be kept in
  // memory until backward.
  bool is_forward(int32_t node) const { return g_.nodes[size_t(node)].phase == Phase::kForward; }

  // ---- groups

  // Joins the producers of a node's operands. A producer that could not be joined at first may be
  // joined after another, which removes a path around it.
  void join_producers(int32_t node) {
    for (bool joined = true; joined;) {
      joined = false;
      for (ValueId id : g_.nodes[size_t(node)].in)
        if (flow_.inlined(id, node) == kNoNode) joined = try_join(flow_.source(id), node) || joined;
    }
  }

  // Makes one group of the groups of two nodes, if that gives a valid kernel.
  bool try_join(int32_t a, int32_t b) {
    if (!is_fusible(a) || !is_fusible(b) || is_forward(a) != is_forward(b)) return false;
    int32_t x = group_[size_t(a)], y = group_[size_t(b)];
    if (x == y) return false;
    if (rank_[size_t(x)] > rank_[size_t(y)]) std::swap(x, y);
    if (failed_.contains(attempt(x, y)) || path_past(x, y)) return false;
    std::vector<int32_t> nodes;
    std::ranges::merge(members_[size_t(x)], members_[size_t(y)], std::back_inserter(nodes));
    if (!lower_group(flow_, nodes)) {
      failed_.insert(attempt(x, y));
      return false;
    }
    int32_t kept = std::min(x, y), gone = std::max(x, y);
    join_ranks(x, y, kept);
    for (int32_t k : nodes) group_[size_t(k)] = kept;
    members_[size_t(kept)] = std::move(nodes), members_[size_t(gone)].clear();
    return true;
  }

  // Identifies an attempt to join two groups. Groups only grow, so their sizes identify their
  // states.
  std::array<int64_t, 3> attempt(int32_t x, int32_t y) const {
    return {int64_t(x) << 32 | y, int64_t(members_[size_t(x)].size()),
            int64_t(members_[size_t(y)].size())};
  }

  // True if a path leads from one group to a later one through a third; as one kernel they would
  // wait for themselves. No path leads from a group to one of lower rank.
  bool path_past(int32_t from, int32_t to) {
    for (int32_t reached : reachable(from, to))
      for (int32_t k : members_[size_t(reached)])
        for (int32_t next : flow_.after[size_t(k)])
          if (group_[size_t(next)] == to) return true;
    return false;
  }

  // Returns the groups ranked between the two that depend on the first.
  const std::vector<int32_t>& reachable(int32_t from, int32_t to) {
    ++visit_;
    reached_.clear();
    auto expand = [&](int32_t group) {
      for (int32_t k : members_[size_t(group)])
        for (int32_t next : flow_.after[size_t(k)]) {
          int32_t g = group_[size_t(next)];
          if (rank_[size_t(g)] >= rank_[size_t(to)] || g == from) continue;
          if (std::exchange(visited_[size_t(g)], visit_) != visit_) reached_.push_back(g);
        }
    };
    expand(from);
    for (size_t i = 0; i < reached_.size(); ++i) expand(reached_[i]);
    return reached_;
  }

  // Updates ranks, which are an order in which groups can run: groups that depend on x come after
  // the joined group, all others that were ranked between the two come before it.
  void join_ranks(int32_t x, int32_t y, int32_t kept) {
    reachable(x, y);
    int32_t first = rank_[size_t(x)], last = rank_[size_t(y)];
    std::vector<int32_t> ahead, behind;
    for (int32_t r = first + 1; r < last; ++r) {
      int32_t g = at_rank_[size_t(r)];
      if (g == kNoNode) continue;
      (visited_[size_t(g)] == visit_ ? behind : ahead).push_back(g);
    }
    std::fill(at_rank_.begin() + first, at_rank_.begin() + last + 1, kNoNode);
    int32_t r = first;
    auto put = [&](int32_t g) { rank_[size_t(g)] = r, at_rank_[size_t(r++)] = g; };
    for (int32_t g : ahead) put(g);
    put(kept);
    for (int32_t g : behind) put(g);
  }

  // Joins groups that read the same large memory as `node`, so that they read it once.
  void join_readers(ValueId id, int32_t node) {
    int64_t sweep = 1;
    for (const Factor& f : flow_.axes[size_t(node)].factors) sweep *= f.extent;
    if (numel(g_[id].meta.shape) != sweep) return;
    ValueId root = flow_.behind_views(id);  // finds readers of other views too
    if (int32_t m = flow_.inlined(id, node); m != kNoNode) {
      for (ValueId operand : g_.nodes[size_t(m)].in) join_readers(operand, node);
      return;
    }
    std::vector<int32_t> tried;
    const auto& readers = flow_.readers[size_t(root)];
    for (size_t i = readers.size(); i-- > 0;) {
      int32_t other = readers[i];
      if (other >= node || !is_fusible(other)) continue;
      int32_t group = group_[size_t(other)];
      if (std::ranges::count(tried, group)) continue;
      tried.push_back(group);
      try_join(other, node);
    }
  }

  // ---- the new list of nodes

  // Emits groups in an order of their dependences: of those that are ready, the one that began
  // first.
  void emit() {
    std::vector<int32_t> waits_for(g_.nodes.size());
    std::priority_queue<int32_t, std::vector<int32_t>, std::greater<>> ready;
    auto others = [&](int32_t group, const std::vector<std::vector<int32_t>>& edges, auto visit) {
      for (int32_t k : members_[size_t(group)])
        for (int32_t o : edges[size_t(k)])
          if (group_[size_t(o)] != group) visit(group_[size_t(o)]);
    };
    for (int32_t group = 0; group < int32_t(g_.nodes.size()); ++group) {
      if (members_[size_t(group)].empty() || flow_.is_free(group)) continue;
      others(group, flow_.before, [&](int32_t) { ++waits_for[size_t(group)]; });
      if (waits_for[size_t(group)] == 0) ready.push(group);
    }
    placed_.resize(g_.nodes.size());
    while (!ready.empty()) {
      int32_t group = ready.top();
      ready.pop();
      place_group(group);
      others(group, flow_.after, [&](int32_t next) {
        if (--waits_for[size_t(next)] == 0) ready.push(next);
      });
    }
    for (ValueId id : g_.outputs) place_free(id);
    g_.nodes = std::move(nodes_);
    Rewrite(g_).apply();
  }

  // Places views and numbers before their first reader.
  void place_free(ValueId id) {
    int32_t m = flow_.producer[size_t(id)];
    if (m == kNoNode || !flow_.is_free(m) || placed_[size_t(m)]) return;
    for (ValueId operand : g_.nodes[size_t(m)].in) place_free(operand);
    placed_[size_t(m)] = true;
    nodes_.push_back(g_.nodes[size_t(m)]);
  }

  void place(Node node) {
    for (auto* list : {&node.in, &node.into})
      for (ValueId id : *list)
        if (id != kNoValue) place_free(id);
    nodes_.push_back(std::move(node));
  }

  void place_group(int32_t group) {
    const std::vector<int32_t>& members = members_[size_t(group)];
    if (members.size() == 1) {
      if (!flow_.is_needed(members[0])) return;
      if (!inlines(flow_, members[0])) return place(g_.nodes[size_t(members[0])]);
    }
    std::optional<LoweredGroup> kernel = lower_group(flow_, members);
    TESSERA_ASSERT(kernel, "fuse: a group of {} nodes makes no kernel any more", members.size());
    Metas results;
    for (ValueId id : kernel->out) results.push_back(g_[id].meta);
    const Node& last = g_.nodes[size_t(members.back())];
    std::string name = kernel_name(g_, members);
    place({.prim = PrimRef(new Fused(name, std::move(kernel->body), results)),
           .in = kernel->in,
           .out = kernel->out,
           .into = kernel->into,
           .phase = last.phase,
           .scope = last.scope});
  }

  Graph& g_;
  const Dataflow& flow_;
  std::vector<int32_t> group_;                 // by node: named by its first node
  std::vector<std::vector<int32_t>> members_;  // by group, in order; empty: joined another
  std::vector<int32_t> rank_, at_rank_;  // of groups, and groups by rank; kNoNode: no group has it
  std::set<std::array<int64_t, 3>> failed_;  // attempts that made no kernel
  std::vector<uint32_t> visited_;
  uint32_t visit_ = 0;
  std::vector<int32_t> reached_;
  std::vector<bool> placed_;
  std::vector<Node> nodes_;
};

}  // namespace

void fuse(Graph& graph) {
  std::vector<bool> kept(graph.nodes.size());
  std::optional<Dataflow> flow(std::in_place, graph);
  while (keep_what_is_not_inlined(*flow, kept)) flow.emplace(graph, kept);
  Fusion(graph, *flow).run();
}

}  // namespace tessera::compiler
