#include "compile/passes/recompute.h"

#include <algorithm>
#include <optional>

#include "compile/ir/cost.h"
#include "compile/ir/rewrite.h"

namespace tessera::compiler {
namespace {

bool is_view(const Node& n) { return n.role == Role::kView && n.into.empty(); }

// Nodes that draw random bits may run twice: with the same key they draw the same bits.
bool may_run_twice(const Node& n) {
  return n.phase == Phase::kForward && n.into.empty() && n.role != Role::kCollective;
}

class Selection {
 public:
  explicit Selection(const Graph& g)
      : g_(g),
        uses_(g),
        memory_(memory_uses(g)),
        first_backward_(g.values.size(), kNoNode),
        last_forward_(g.values.size(), kNoNode),
        chosen_(g.nodes.size()) {
    for (int32_t k = 0; k < int32_t(g.nodes.size()); ++k) {
      const Node& n = g.nodes[size_t(k)];
      if (is_view(n)) continue;
      for (ValueId id : n.in) {
        ValueId b = g[id].buffer;
        if (b == kNoBuffer) continue;
        if (n.phase != Phase::kBackward)
          last_forward_[size_t(b)] = k;
        else if (first_backward_[size_t(b)] == kNoNode)
          first_backward_[size_t(b)] = k;
      }
    }
    for (int32_t k = 0; k < int32_t(g.nodes.size()); ++k)
      if (frees(k) > 0) candidates_.push_back(k);
  }

  std::vector<std::vector<int32_t>> run() {
    std::vector<std::vector<int32_t>> groups;
    for (;;) {
      std::vector<int32_t> best;
      double best_ratio = 0;
      for (int32_t k : candidates_) {
        if (chosen_[size_t(k)]) continue;
        std::optional<std::vector<int32_t>> group = needs(k);
        if (!group) continue;
        double us = 0;
        for (int32_t m : *group) us += compute_us(g_, g_.nodes[size_t(m)]);
        double ratio = us / double(frees(k));
        if (best.empty() || ratio < best_ratio) best = std::move(*group), best_ratio = ratio;
      }
      if (best.empty()) return groups;
      for (int32_t m : best) chosen_[size_t(m)] = true;
      groups.push_back(std::move(best));
    }
  }

 private:
  // True where the value has memory of its own that is read in forward, then in backward, and not
  // otherwise.
  bool waits_for_backward(ValueId id) const {
    const MemoryUse& m = memory_[size_t(id)];
    return g_[id].buffer == id && first_backward_[size_t(id)] != kNoNode &&
           last_forward_[size_t(id)] < first_backward_[size_t(id)] && m.writes.empty() &&
           m.outputs == 0 && !m.external;
  }

  // The bytes that need not be kept for backward if node `k` is computed again.
  size_t frees(int32_t k) const {
    const Node& n = g_.nodes[size_t(k)];
    if (!may_run_twice(n) || is_view(n)) return 0;
    size_t bytes = 0;
    for (ValueId id : n.out) {
      if (waits_for_backward(id)) bytes += bytes_of(g_, id);
      // If some of its results have to stay anyway, the node does not run again for the others.
      if (!waits_for_backward(id) && first_backward_[size_t(id)] != kNoNode) return 0;
    }
    return bytes;
  }

  // The nodes that have to run again to compute `k` again: `k`, and those it reads whose results
  // are not kept until then. Nothing if that is impossible.
  std::optional<std::vector<int32_t>> needs(int32_t k) const {
    int32_t when = int32_t(g_.nodes.size());
    for (ValueId id : g_.nodes[size_t(k)].out)
      if (first_backward_[size_t(id)] != kNoNode)
        when = std::min(when, first_backward_[size_t(id)]);
    std::vector<int32_t> group = {k};
    for (size_t i = 0; i < group.size(); ++i) {
      for (ValueId id : g_.nodes[size_t(group[i])].in) {
        ValueId b = g_[id].buffer;
        if (b == kNoBuffer) continue;
        // A later write would make it read another state of that memory.
        for (int32_t w : memory_[size_t(b)].writes)
          if (w >= group[i] && w < when) return std::nullopt;
        int32_t m = uses_.producer[size_t(b)];
        if (m == kNoNode || chosen_[size_t(m)] || is_kept(b)) continue;
        if (std::ranges::count(group, m)) continue;
        if (!may_run_twice(g_.nodes[size_t(m)]) || !memory_[size_t(b)].writes.empty())
          return std::nullopt;
        group.push_back(m);
      }
      if (group.size() > kMostNodes) return std::nullopt;
    }
    return group;
  }
  bool is_kept(ValueId buffer) const {
    return first_backward_[size_t(buffer)] != kNoNode || memory_[size_t(buffer)].outputs > 0;
  }

  static constexpr size_t kMostNodes = 32;

  const Graph& g_;
  const Uses uses_;
  const std::vector<MemoryUse> memory_;
  std::vector<int32_t> first_backward_, last_forward_;  // readers, by buffer
  std::vector<int32_t> candidates_;
  std::vector<bool> chosen_;  // by node
};

class Cloning {
 public:
  Cloning(const Graph& g, const std::vector<int32_t>& nodes)
      : out_(g), uses_(g), wanted_(g.nodes.size()), clone_(g.values.size(), kNoValue) {
    for (int32_t k : nodes) wanted_[size_t(k)] = true;
  }

  Graph run() {
    std::vector<Node> before = std::move(out_.nodes);
    out_.nodes.clear();
    old_ = &before;
    for (const Node& n : before) {
      Node next = n;
      if (n.phase == Phase::kBackward)
        for (ValueId& id : next.in) id = in_backward(id);
      out_.nodes.push_back(std::move(next));
    }
    Rewrite(out_).apply();
    return std::move(out_);
  }

 private:
  // Returns the value that replaces `id` in backward, computing again here what is needed for it.
  ValueId in_backward(ValueId id) {
    if (ValueId c = clone_[size_t(id)]; c != kNoValue) return c;
    int32_t m = uses_.producer[size_t(id)];
    if (m == kNoNode) return id;
    const Node& n = (*old_)[size_t(m)];
    if (is_view(n) && n.phase == Phase::kForward) {
      ValueId base = in_backward(n.in[0]);
      if (base == n.in[0]) return id;
    } else if (!wanted_[size_t(m)]) {
      return id;
    }
    Node copy = n;
    copy.phase = Phase::kBackward;
    for (ValueId& operand : copy.in) operand = in_backward(operand);
    for (ValueId& result : copy.out) {
      ValueId fresh = ValueId(out_.values.size());
      Value v = out_[result];
      if (v.buffer == result) v.buffer = fresh;
      if (is_view(n) && v.buffer != kNoBuffer) v.buffer = out_[copy.in[0]].buffer;
      out_.values.push_back(std::move(v));
      clone_[size_t(result)] = fresh;
      result = fresh;
    }
    out_.nodes.push_back(std::move(copy));
    return clone_[size_t(id)];
  }

  Graph out_;
  const Uses uses_;
  const std::vector<Node>* old_ = nullptr;
  std::vector<bool> wanted_;    // by node
  std::vector<ValueId> clone_;  // by value of the graph as it was
};

}  // namespace

std::vector<std::vector<int32_t>> recomputable(const Graph& graph) {
  return Selection(graph).run();
}

Graph recomputed(const Graph& graph, const std::vector<int32_t>& nodes) {
  return Cloning(graph, nodes).run();
}

}  // namespace tessera::compiler
