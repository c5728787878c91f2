#include "dtensor/redistribute.h"

#include <cmath>
#include <limits>
#include <queue>

#include "collectives/ops.h"
#include "core/ops/create.h"
#include "core/ops/views.h"
#include "dtensor/hash.h"
#include "dtensor/mesh_state.h"

namespace tessera {
namespace {

constexpr double kLatency = 256;  // of a collective, in elements that cost as much
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The number of elements of a rank's box if all cuts were even.
double volume(const Shape& global, const Layout& layout, const Coordinates& sizes) {
  double n = double(numel(global));
  for (size_t a = 0; a < layout.size(); ++a)
    if (layout[a].is_shard()) n /= sizes[a];
  return n;
}

double step_cost(const Shape& global, const Layout& before, const Step& s,
                 const Coordinates& sizes) {
  double ranks = sizes[size_t(s.axis)], share = (ranks - 1) / ranks;
  if (ranks == 1) return 0;
  double here = volume(global, before, sizes);
  if (s.from.is_replicate()) return 1e-6 * here;
  if (s.from.is_partial()) {
    // A tie between routes: earlier axes cut the pieces of later ones, so reducing over them first
    // makes the sum over both one balanced tree.
    double late = 0;
    for (int b = 0; b < s.axis; ++b) late += before[size_t(b)].is_partial() ? 0.1 : 0;
    return kLatency + here * share * (s.to.is_replicate() ? 2 : 1) + late;
  }
  return kLatency + (s.to.is_replicate() ? here * ranks * share : here * share);
}

// Axes before `a` cut the pieces of `a`, so `a` cannot change a dim that one of them cuts.
bool cut_inside(const Layout& layout, size_t a, const Placement& p) {
  for (size_t b = 0; b < a; ++b)
    if (p.is_shard() && layout[b].is_shard(p.dim)) return true;
  return false;
}

// Searches the cheapest route: layouts are the nodes of a graph, steps its edges.
class Search {
 public:
  Search(const Shape& global, const Layout& from, const Layout& to, const Coordinates& sizes)
      : global_(global), from_(from), to_(to), sizes_(sizes) {
    for (size_t a = 0; a < from.size(); ++a) {
      auto& list = candidates_.emplace_back();
      auto add = [&](const Placement& p) {
        if (std::ranges::find(list, p) == list.end()) list.push_back(p);
      };
      add(from[a]), add(to[a]), add(Replicate());
      for (const Layout* l : {&from, &to})
        for (const Placement& p : *l)
          if (p.is_shard()) add(p);
    }
  }

  Route run() {
    visit(from_, 0, -1, {});
    while (!queue_.empty()) {
      auto [cost, at] = queue_.top();
      queue_.pop();
      if (cost > nodes_[size_t(at)].cost) continue;
      if (nodes_[size_t(at)].layout == to_) return route_to(at);
      expand(at);
    }
    throw ShardingError(fmt::format("redistribute: no way from {} to {} for {}", to_string(from_),
                                    to_string(to_), to_string(global_)));
  }

 private:
  struct Node {
    Layout layout;
    double cost = kInfinity;
    int before = -1;
    Step step;
  };

  void expand(int at) {
    for (size_t a = 0; a < from_.size(); ++a)
      for (const Placement& p : candidates_[a]) {
        const Layout now = nodes_[size_t(at)].layout;
        if (now[a] == p) continue;
        Layout next = now;
        next[a] = p;
        Step step{int(a), now[a], p};
        double cost = nodes_[size_t(at)].cost;
        if (sizes_[a] > 1 && !same_boxes_and_terms(now, next, a)) {
          if (!legal(now, step)) continue;
          cost += step_cost(global_, now, step, sizes_);
        }
        if (fits(global_, next, sizes_)) visit(next, cost, at, step);
      }
  }
  // Whether two layouts have the same cuts and terms in other words, so that no step is needed.
  bool same_boxes_and_terms(const Layout& now, const Layout& next, size_t a) const {
    return now[a].is_shard() && next[a].is_shard() && now[a].dim == next[a].dim &&
           same_boxes(global_, now, next, sizes_);
  }
  bool legal(const Layout& now, const Step& s) const {
    size_t a = size_t(s.axis);
    if (s.to.is_partial() && !(s.from.is_replicate() && s.to == to_[a])) return false;
    if (s.from.is_shard() && s.to.is_shard(s.from.dim)) return false;  // through Replicate
    return !cut_inside(now, a, s.from) && !cut_inside(now, a, s.to);
  }
  void visit(const Layout& layout, double cost, int before, const Step& step) {
    int at = 0;
    while (at < int(nodes_.size()) && !(nodes_[size_t(at)].layout == layout)) ++at;
    if (at == int(nodes_.size())) nodes_.push_back({layout, kInfinity, -1, {}});
    Node& node = nodes_[size_t(at)];
    if (cost >= node.cost) return;
    node.cost = cost, node.before = before, node.step = step;
    queue_.push({cost, at});
  }
  Route route_to(int at) const {
    Route route;
    for (; nodes_[size_t(at)].before >= 0; at = nodes_[size_t(at)].before)
      route.insert(0, nodes_[size_t(at)].step);
    return route;
  }

  using Queued = std::pair<double, int>;
  const Shape& global_;
  const Layout &from_, &to_;
  const Coordinates& sizes_;
  std::vector<std::vector<Placement>> candidates_;
  std::vector<Node> nodes_;
  std::priority_queue<Queued, std::vector<Queued>, std::greater<>> queue_;
};

// ---- the collectives of one step. `extent` is that of the dim that the axis cuts, after the cuts
// of later axes.

Tensor flat(const Tensor& t) { return reshape(t, {t.numel()}); }

int64_t others(const Shape& s, int dim) {
  int64_t n = 1;
  for (int d = 0; d < s.size(); ++d)
    if (d != dim) n *= s[d];
  return n;
}

// Cuts dim `dim` of `x` over the ranks and puts the pieces one after the other.
Tensor by_rank(const Tensor& x, int dim, int64_t unit, int ranks) {
  if (dim == 0) return flat(contiguous(x));
  std::vector<Tensor> parts;
  for (int r = 0; r < ranks; ++r) {
    Range piece = cut({0, x.size(dim), 0}, unit, ranks, r);
    parts.push_back(flat(contiguous(narrow(x, dim, piece.begin, piece.size))));
  }
  return cat(parts, 0);
}

// Does the reverse: `pieces`, one after the other, are joined along dim `dim`, whose extent is
// `shape[dim]` in all.
Tensor joined(const Tensor& pieces, const Shape& shape, int dim, int64_t unit, int ranks) {
  if (dim == 0) return reshape(pieces, shape);
  std::vector<Tensor> parts;
  int64_t row = others(shape, dim), begin = 0;
  for (int r = 0; r < ranks; ++r) {
    Shape s = shape;
    s[dim] = cut({0, shape[dim], 0}, unit, ranks, r).size;
    parts.push_back(reshape(narrow(pieces, 0, begin, s[dim] * row), s));
    begin += s[dim] * row;
  }
  return cat(parts, dim);
}

// Returns a term for each rank such that the reduction of all terms is `x`, which every rank has.
Tensor term_of(const Tensor& x, ReduceOp op, int rank) {
  switch (op) {
    case ReduceOp::kAvg:
    case ReduceOp::kMax:
    case ReduceOp::kMin: return x;
    case ReduceOp::kSum: return rank == 0 ? x : zeros_like(x);
    case ReduceOp::kProduct: return rank == 0 ? x : ones_like(x);
    default:
      throw ShardingError(
          fmt::format("redistribute: Replicate does not become Partial({})", name_of(op)));
  }
}

Tensor run_step(const Step& s, Tensor x, int64_t extent_from, const Ref<ProcessGroup>& group) {
  int ranks = group->size(), rank = group->rank();
  const Placement &from = s.from, &to = s.to;
  if (ranks == 1) return x;
  if (from.is_replicate() && to.is_shard()) {
    Range mine = cut({0, x.size(to.dim), 0}, to.unit, ranks, rank);
    return narrow(x, to.dim, mine.begin, mine.size);
  }
  if (from.is_replicate()) return term_of(x, to.op, rank);
  Shape shape = x.shape();
  if (from.is_partial() && to.is_replicate()) return all_reduce(contiguous(x), group, from.op);
  if (from.is_partial()) {
    Pieces pieces{shape[to.dim], to.unit, others(shape, to.dim)};
    Tensor mine = reduce_scatter_v(by_rank(x, to.dim, to.unit, ranks), group, pieces, from.op);
    shape[to.dim] = cut({0, pieces.extent, 0}, to.unit, ranks, rank).size;
    return reshape(mine, shape);
  }
  if (to.is_replicate()) {
    Pieces pieces{extent_from, from.unit, others(shape, from.dim)};
    shape[from.dim] = extent_from;
    return joined(all_gather_v(contiguous(x), group, pieces), shape, from.dim, from.unit, ranks);
  }
  Pieces in{shape[to.dim], to.unit, others(shape, to.dim)};
  Shape result = shape;
  result[from.dim] = extent_from;
  result[to.dim] = cut({0, in.extent, 0}, to.unit, ranks, rank).size;
  Pieces out{extent_from, from.unit, others(result, from.dim)};
  return joined(all_to_all_v(by_rank(x, to.dim, to.unit, ranks), group, in, out), result, from.dim,
                from.unit, ranks);
}

}  // namespace

bool communicates(const Step& s, const Coordinates& sizes) {
  return sizes[size_t(s.axis)] > 1 && !s.from.is_replicate();
}

Route plan_route(const Shape& global, const Layout& from, const Layout& to,
                 const Coordinates& sizes) {
  TESSERA_CHECK_AS(ShardingError, from.size() == sizes.size() && to.size() == sizes.size(),
                   "redistribute: {} to {} on a mesh of {} axes; give a placement for each axis",
                   to_string(from), to_string(to), sizes.size());
  if (from == to) return {};
  // Gives the clear error if `to` does not fit.
  box_of(global, to, sizes, Coordinates(sizes.size(), 0));
  Route route = Search(global, from, to, sizes).run();
  Route real;  // without steps that move nothing
  Layout now = from;
  for (const Step& s : route) {
    Layout next = now;
    next[size_t(s.axis)] = s.to;
    bool words = s.from.is_shard() && s.to.is_shard(s.from.dim);
    if (!words) real.push_back(s);
    now = next;
  }
  return real;
}

double route_cost(const Shape& global, Layout from, const Route& route, const Coordinates& sizes) {
  double cost = 0;
  for (const Step& s : route) {
    cost += step_cost(global, from, s, sizes);
    from[size_t(s.axis)] = s.to;
  }
  return cost;
}

Tensor run_route(const Shape& global, Layout now, const Route& route, Tensor local,
                 const DeviceMesh& mesh) {
  for (const Step& s : route) {
    Layout without = now;
    without[size_t(s.axis)] = Replicate();
    int64_t extent = 0;
    if (s.from.is_shard())
      extent = box_of(global, without, mesh.sizes(), mesh.coordinate())[size_t(s.from.dim)].size;
    local = run_step(s, std::move(local), extent, mesh.group(s.axis));
    now[size_t(s.axis)] = s.to;
  }
  return local;
}

const Route& RouteCache::find(const Shape& global, const Layout& from, const Layout& to,
                              const Coordinates& sizes) {
  Hash h;
  h.add(global), h.add(from), h.add(to);
  auto matches = [&](const Entry& e) { return e.global == global && e.from == from && e.to == to; };
  if (Entry* known = entries_.find(h.value(), matches)) return known->route;
  auto entry =
      std::make_unique<Entry>(Entry{global, from, to, plan_route(global, from, to, sizes)});
  return entries_.add(h.value(), std::move(entry)).route;
}

const Route& cached_route(const Shape& global, const Layout& from, const Layout& to,
                          const DeviceMesh& mesh) {
  return mesh.state().routes.find(global, from, to, mesh.sizes());
}

}  // namespace tessera
