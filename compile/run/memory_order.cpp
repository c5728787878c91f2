#include "compile/run/memory_order.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

// A node that computes, together with the views of what it makes.
struct Unit {
  SmallVector<int32_t, 4> nodes = {};
  bool fixed = false;  // an effect, a collective, or views of inputs
  bool collective = false;
  bool waits = false;                  // reads what a collective made: must not begin earlier
  int64_t made = 0;                    // bytes of its results
  SmallVector<ValueId, 6> reads = {};  // buffers made by units, each once
  SmallVector<ValueId, 2> makes = {};  // buffers
};

class Order {
 public:
  explicit Order(Graph& g) : g_(g), unit_of_(g.values.size(), 0), readers_(g.values.size()) {
    gather_units();
    outlives_.resize(g.values.size());
    for (ValueId id : g.outputs)
      if (ValueId b = g[id].buffer; b != kNoBuffer) outlives_[size_t(b)] = true;
  }

  void run() {
    constexpr int kSweeps = 16;  // no graph so far needed more than two or three
    bool changed = true;
    for (int sweep = 0; sweep < kSweeps && changed; ++sweep) {
      changed = false;
      for (size_t i = 1; i < order_.size(); ++i)
        for (size_t k = i; k > 0 && better_before(order_[k], order_[k - 1]); --k) {
          std::swap(order_[k], order_[k - 1]);
          std::swap(position_[size_t(order_[k])], position_[size_t(order_[k - 1])]);
          changed = true;
        }
    }
    std::vector<Node> nodes;
    nodes.reserve(g_.nodes.size());
    for (int u : order_)
      for (int32_t n : units_[size_t(u)].nodes) nodes.push_back(std::move(g_.nodes[size_t(n)]));
    g_.nodes = std::move(nodes);
  }

 private:
  void gather_units() {
    units_.push_back({.fixed = true});  // views of inputs
    for (int32_t k = 0; k < int32_t(g_.nodes.size()); ++k) {
      const Node& n = g_.nodes[size_t(k)];
      int u = int(units_.size());
      if (n.prim->is_view() && n.into.empty()) {
        u = 0;
        for (ValueId id : n.in) u = std::max(u, unit_of_[size_t(id)]);
      } else {
        bool collective = n.role == Role::kCollective;
        units_.push_back({.fixed = collective || !n.into.empty(), .collective = collective});
      }
      Unit& unit = units_[size_t(u)];
      unit.nodes.push_back(k);
      for (ValueId id : n.in)
        unit.waits |= unit_of_[size_t(id)] != u && units_[size_t(unit_of_[size_t(id)])].collective;
      for (ValueId id : n.out) {
        unit_of_[size_t(id)] = u;
        const Value& v = g_[id];
        if (v.buffer != id) continue;
        unit.made += int64_t(size_t(numel(v.meta.shape)) * size_of(v.meta.dtype));
        unit.makes.push_back(id);
      }
      for (auto* list : {&n.in, &n.into})
        for (ValueId id : *list)
          if (id != kNoValue) add_read(u, g_[id].buffer);
    }
    for (int u = 0; u < int(units_.size()); ++u) order_.push_back(u), position_.push_back(u);
  }
  void add_read(int u, ValueId buffer) {
    // Inputs are in memory anyway.
    if (buffer == kNoBuffer || unit_of_[size_t(buffer)] == 0) return;
    auto& reads = units_[size_t(u)].reads;
    if (unit_of_[size_t(buffer)] == u ||
        std::find(reads.begin(), reads.end(), buffer) != reads.end())
      return;
    reads.push_back(buffer);
    readers_[size_t(buffer)].push_back(u);
  }

  bool depends(const Unit& later, const Unit& earlier) const {
    return std::any_of(later.reads.begin(), later.reads.end(), [&](ValueId b) {
      return std::find(earlier.makes.begin(), earlier.makes.end(), b) != earlier.makes.end();
    });
  }

  // The bytes that running `u` frees if its neighbour `other` has not run yet.
  int64_t freed(const Unit& u, const Unit& other) const {
    int64_t bytes = 0;
    for (ValueId b : u.reads)
      if (std::find(other.reads.begin(), other.reads.end(), b) == other.reads.end() &&
          dies_in(b, u))
        bytes += int64_t(size_t(numel(g_[b].meta.shape)) * size_of(g_[b].meta.dtype));
    return bytes;
  }
  // True when no unit after `u` reads `b`, in the present order.
  bool dies_in(ValueId b, const Unit& u) const {
    if (outlives_[size_t(b)]) return false;
    int position = position_[size_t(&u - units_.data())];
    for (int reader : readers_[size_t(b)])
      if (position_[size_t(reader)] > position) return false;
    return true;
  }

  bool better_before(int later, int earlier) {
    const Unit &b = units_[size_t(later)], &a = units_[size_t(earlier)];
    if (a.fixed || b.fixed || b.waits || depends(b, a)) return false;
    int64_t as_is = std::max(a.made, a.made - freed(a, b) + b.made),
            swapped = std::max(b.made, b.made - freed(b, a) + a.made);
    return swapped < as_is;
  }

  Graph& g_;
  std::vector<Unit> units_;
  std::vector<int> order_, position_;
  std::vector<int> unit_of_;                  // by value; 0: inputs and views of them
  std::vector<SmallVector<int, 4>> readers_;  // by buffer
  std::vector<bool> outlives_;                // by buffer
};

}  // namespace

void order_for_memory(Graph& graph) { Order(graph).run(); }

}  // namespace tessera::compiler
