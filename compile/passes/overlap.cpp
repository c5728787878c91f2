// Moves computation to where it hides communication. Going from the last collective to the first:
// where less is computed between a collective and the first reader of its result than the
// collective takes, nodes before it that it does not need are moved behind it, nearest first, until
// there is enough. The gradient of a weight is then computed while the gradient of the activation
// is summed over the ranks. Invariants: collectives keep their order, which is their order on every
// rank; computation that hides another collective is not taken from it.
#include <algorithm>
#include <numeric>

#include "compile/ir/cost.h"
#include "compile/ir/rewrite.h"
#include "compile/passes/passes.h"

namespace tessera::compiler {
namespace {

// For each node, the nodes that have to run before it, because of values or of memory that is
// written.
std::vector<std::vector<int32_t>> dependences(const Graph& g) {
  std::vector<std::vector<int32_t>> before(g.nodes.size()), readers(g.values.size());
  std::vector<int32_t> producer(g.values.size(), kNoNode), writer(g.values.size(), kNoNode);
  for (int32_t k = 0; k < int32_t(g.nodes.size()); ++k) {
    const Node& n = g.nodes[size_t(k)];
    auto after = [&](int32_t earlier) {
      if (earlier != kNoNode && earlier != k) before[size_t(k)].push_back(earlier);
    };
    for (ValueId id : n.in) {
      after(producer[size_t(id)]);
      ValueId b = g[id].buffer;
      if (b == kNoBuffer) continue;
      after(writer[size_t(b)]);
      readers[size_t(b)].push_back(k);
    }
    for (ValueId id : n.into) {
      if (id == kNoValue) continue;
      auto b = size_t(g[id].buffer);
      after(producer[size_t(id)]), after(writer[b]);
      for (int32_t r : readers[b]) after(r);
      readers[b].clear();
      writer[b] = k;
    }
    for (ValueId id : n.out) producer[size_t(id)] = k;
  }
  return before;
}

class Placement {
 public:
  explicit Placement(Graph& g) : g_(g), before_(dependences(g)), waits_(g.nodes.size()) {
    order_.resize(g.nodes.size()), left_.resize(g.nodes.size() + 1);
    std::iota(order_.begin(), order_.end(), 0);
    for (size_t p = order_.size(); p-- > 0;) left_[p] = left_[p + 1] + compute_us(g, node(p));
    std::vector<bool> pending(g.values.size());  // by buffer
    for (size_t k = 0; k < g.nodes.size(); ++k) {
      const Node& n = g.nodes[k];
      for_each_buffer(n, [&](ValueId b) {
        if (!is_view(n) && !is_collective(n)) waits_[k] = waits_[k] || pending[size_t(b)];
      });
      if (is_collective(n))
        for (ValueId id : n.out) pending[size_t(g[id].buffer)] = true;
    }
  }

  void run() {
    double later = 0;  // time left to compute when the next collective has to begin
    for (size_t p = order_.size(); p-- > 0;) {
      if (!is_collective(node(p))) continue;
      double needed = std::max(later, left_[first_reader(p)]) + communication_us(g_, node(p));
      if (left_[p + 1] < needed) p = move_up(p, needed);
      later = std::min(needed, left_[p + 1]);
    }
    std::vector<Node> nodes;
    nodes.reserve(order_.size());
    for (int32_t k : order_) nodes.push_back(std::move(g_.nodes[size_t(k)]));
    g_.nodes = std::move(nodes);
    Rewrite(g_).apply();
  }

 private:
  const Node& node(size_t position) const { return g_.nodes[size_t(order_[position])]; }
  static bool is_view(const Node& n) { return n.role == Role::kView && n.into.empty(); }
  static bool is_collective(const Node& n) { return n.role == Role::kCollective; }

  template <class F>
  void for_each_buffer(const Node& n, F f) const {
    for (auto* list : {&n.in, &n.into})
      for (ValueId id : *list)
        if (id != kNoValue && g_[id].buffer != kNoBuffer) f(g_[id].buffer);
  }

  // The position of the first node that waits for the collective at `p`; the end if none does.
  size_t first_reader(size_t p) const {
    for (size_t q = p + 1; q < order_.size(); ++q) {
      bool reads = false;
      for_each_buffer(node(q), [&](ValueId b) {
        for (ValueId id : node(p).out) reads = reads || g_[id].buffer == b;
      });
      if (reads && !is_view(node(q))) return q;
    }
    return order_.size();
  }

  // Moves nodes from before the collective at `p` to behind it until computing them takes `needed`,
  // as far as possible. Returns the collective's new position.
  size_t move_up(size_t p, double needed) {
    std::vector<bool> wanted(order_.size());  // by node: needed by what stays before the collective
    auto keep = [&](size_t q) {
      for (int32_t b : before_[size_t(order_[q])]) wanted[size_t(b)] = true;
    };
    keep(p);
    std::vector<int32_t> stay = {order_[p]}, moved;  // from the last to the first
    double left = left_[p + 1];
    size_t q = p;
    while (q > 0 && left < needed && !waits_[size_t(order_[q - 1])]) {
      --q;
      if (wanted[size_t(order_[q])] || is_collective(node(q))) {
        keep(q), stay.push_back(order_[q]);
      } else {
        moved.push_back(order_[q]), left += compute_us(g_, node(q));
      }
    }
    std::reverse_copy(stay.begin(), stay.end(), order_.begin() + std::ptrdiff_t(q));
    std::reverse_copy(moved.begin(), moved.end(), order_.begin() + std::ptrdiff_t(q + stay.size()));
    for (size_t at = p + 1; at-- > q;) left_[at] = left_[at + 1] + compute_us(g_, node(at));
    return q + stay.size() - 1;
  }

  Graph& g_;
  const std::vector<std::vector<int32_t>> before_;  // by node
  std::vector<bool> waits_;                         // by node: it waits for a collective
  std::vector<int32_t> order_;                      // nodes by position
  std::vector<double> left_;  // by position: microseconds of computing from here to the end
};

}  // namespace

void overlap_collectives(Graph& graph) { Placement(graph).run(); }

}  // namespace tessera::compiler
