#include "compile/passes/dataflow.h"

#include <algorithm>

#include "compile/codegen/device_kernels.h"
#include "compile/ir/rewrite.h"
#include "compile/passes/closed_set.h"

namespace tessera::compiler {
namespace {

bool all_pass(const AxisMap& map) {
  if (map.empty()) return false;
  for (const Factor& f : map.factors)
    if (f.kind == Factor::kWhole && f.extent != 1) return false;
  return true;
}

SmallVector<const Meta*, 4> metas_of(const Graph& g, const Node& n) {
  SmallVector<const Meta*, 4> metas;
  for (ValueId id : n.in) metas.push_back(&g[id].meta);
  return metas;
}

// Whether generated code can compute the node: all its operands and results have elements and are
// on one device that takes such code, but for numbers of the host beside others.
bool has_elements(const Graph& g, const Node& n) {
  if (n.out.empty() || !generates_code(g[n.out[0]].meta.device)) return false;
  for (auto* list : {&n.in, &n.out})
    for (ValueId id : *list) {
      const Meta& m = g[id].meta;
      if (g[id].buffer == kNoBuffer || numel(m.shape) == 0) return false;
      if (m.device != g[n.out[0]].meta.device && (list == &n.out || !is_host_number(m)))
        return false;
    }
  return true;
}

// True if no two elements share an address.
bool is_injective(const Meta& m) {
  std::vector<std::pair<int64_t, int64_t>> steps;
  for (int d = 0; d < m.shape.size(); ++d)
    if (m.shape[d] > 1) steps.emplace_back(m.strides[d], m.shape[d]);
  std::sort(steps.begin(), steps.end());
  int64_t reach = 0;
  for (auto [stride, extent] : steps) {
    if (stride <= reach) return false;
    reach += stride * (extent - 1);
  }
  return true;
}

NodeKind kind_of(const Graph& g, const Node& n, const std::vector<MemoryUse>& memory) {
  if (n.role == Role::kCollective) return NodeKind::kOther;
  if (n.prim->is_view() && n.into.empty())
    return has_elements(g, n) && is_transparent_view(*n.prim) &&
                   all_pass(n.prim->axes(metas_of(g, n)))
               ? NodeKind::kTransparent
               : NodeKind::kOpaque;
  if (n.into.empty() && n.prim->traits().kind == OpKind::kFill &&
      memory[size_t(n.out[0])].writes.empty() && has_elements(g, n))
    return NodeKind::kNumber;
  bool fits = is_elementwise(*n.prim) || n.prim->name() == "copy" ||
              (as_reduction(*n.prim) && !g.deterministic);
  if (!fits || n.out.size() != 1 || !has_elements(g, n) || !is_injective(g[n.out[0]].meta) ||
      may_trap(*n.prim, g[n.in[0]].meta.dtype))
    return NodeKind::kOther;
  return NodeKind::kFusible;
}

}  // namespace

bool Dataflow::is_view(int32_t node) const {
  return node != kNoNode &&
         (kind[size_t(node)] == NodeKind::kTransparent || kind[size_t(node)] == NodeKind::kOpaque);
}

int32_t Dataflow::source(ValueId id) const {
  int32_t m = producer[size_t(id)];
  while (is_view(m)) id = graph.nodes[size_t(m)].in[0], m = producer[size_t(id)];
  return m;
}

ValueId Dataflow::behind_views(ValueId id) const {
  for (int32_t m = producer[size_t(id)]; m != kNoNode && kind[size_t(m)] == NodeKind::kTransparent;
       m = producer[size_t(id)])
    id = graph.nodes[size_t(m)].in[0];
  return id;
}

bool Dataflow::is_needed(int32_t k) const {
  const Node& n = graph.nodes[size_t(k)];
  if (kind[size_t(k)] != NodeKind::kFusible || !n.into.empty()) return true;
  return is_output[size_t(n.out[0])] || !readers[size_t(n.out[0])].empty();
}

bool Dataflow::is_inlined(int32_t m, int32_t reader) const {
  if (m == kNoNode || m == reader || kind[size_t(reader)] != NodeKind::kFusible) return false;
  auto forward = [&](int32_t k) { return graph.nodes[size_t(k)].phase == Phase::kForward; };
  return recompute[size_t(m)] == Recompute::kAlways ||
         (recompute[size_t(m)] == Recompute::kOtherPhase && forward(m) != forward(reader));
}

Dataflow::Dataflow(const Graph& g, const std::vector<bool>& kept)
    : graph(g),
      kind(g.nodes.size()),
      recompute(g.nodes.size()),
      axes(g.nodes.size()),
      before(g.nodes.size()),
      after(g.nodes.size()),
      producer(g.values.size(), kNoNode),
      readers(g.values.size()),
      is_output(g.values.size()) {
  classify();
  choose_recomputed(kept);
  add_dependences();
}

void Dataflow::classify() {
  std::vector<MemoryUse> memory = memory_uses(graph);
  for (size_t k = 0; k < graph.nodes.size(); ++k) {
    const Node& n = graph.nodes[k];
    kind[k] = kind_of(graph, n, memory);
    if (kind[k] == NodeKind::kFusible || kind[k] == NodeKind::kTransparent)
      axes[k] = n.prim->axes(metas_of(graph, n));
    for (ValueId id : n.out) producer[size_t(id)] = int32_t(k);
  }
  for (const MemoryUse& m : memory) written_.push_back(!m.writes.empty());
  for (ValueId id : graph.outputs)
    for (;;) {
      is_output[size_t(id)] = true;
      if (!is_view(producer[size_t(id)])) break;
      id = graph.nodes[size_t(producer[size_t(id)])].in[0];
    }
}

// ---- which nodes are computed again

void Dataflow::choose_recomputed(const std::vector<bool>& kept) {
  // By value: the nodes that read it, past views; kNoNode for a reader behind a view that loops do
  // not pass through.
  std::vector<std::vector<int32_t>> direct(graph.values.size());
  for (size_t k = 0; k < graph.nodes.size(); ++k) {
    if (is_free(int32_t(k))) continue;
    for (auto* list : {&graph.nodes[k].in, &graph.nodes[k].into})
      for (ValueId id : *list) {
        if (id == kNoValue) continue;
        ValueId seen = behind_views(id);
        bool opaque = is_view(producer[size_t(seen)]);
        while (is_view(producer[size_t(seen)]))
          seen = graph.nodes[size_t(producer[size_t(seen)])].in[0];
        direct[size_t(seen)].push_back(opaque ? kNoNode : int32_t(k));
      }
  }
  for (size_t k = 0; k < graph.nodes.size(); ++k)
    if (kept.empty() || !kept[k]) recompute[k] = may_recompute(int32_t(k), direct);
}

Recompute Dataflow::may_recompute(int32_t k,
                                  const std::vector<std::vector<int32_t>>& direct) const {
  const Node& n = graph.nodes[size_t(k)];
  if (kind[size_t(k)] != NodeKind::kFusible || !is_cheap(*n.prim) || !n.into.empty() ||
      is_output[size_t(n.out[0])] || written_[size_t(n.out[0])])
    return Recompute::kNever;
  const auto& read_by = direct[size_t(n.out[0])];
  auto source_of = [&](ValueId id) { return producer[size_t(behind_views(id))]; };
  bool numbers = std::ranges::all_of(n.in, [&](ValueId id) {
    int32_t m = source_of(id);
    return m != kNoNode &&
           (kind[size_t(m)] == NodeKind::kNumber || recompute[size_t(m)] == Recompute::kAlways);
  });
  if (numbers) return Recompute::kAlways;

  // Exactly one operand may be large. It is in memory whether or not the result is.
  const Meta& result = graph[n.out[0]].meta;
  int large = 0;
  for (ValueId id : n.in) {
    const Meta& m = graph[id].meta;
    int32_t from = source_of(id);
    if (numel(m.shape) * 8 <= numel(result.shape)) continue;
    bool in_memory = from == kNoNode || kind[size_t(from)] == NodeKind::kOther;
    if (!in_memory || size_of(m.dtype) > size_of(result.dtype)) return Recompute::kNever;
    ++large;
  }
  if (large != 1) return Recompute::kNever;
  int32_t last = k;
  bool elsewhere = false;
  for (int32_t r : read_by) {
    if (r == kNoNode || kind[size_t(r)] != NodeKind::kFusible) return Recompute::kNever;
    elsewhere = elsewhere ||
                (graph.nodes[size_t(r)].phase == Phase::kForward) != (n.phase == Phase::kForward);
    last = std::max(last, r);
  }
  if (!elsewhere) return Recompute::kNever;
  for (int32_t w = k + 1; w <= last; ++w)  // operands must not change before the last reader
    for (ValueId to : graph.nodes[size_t(w)].into)
      for (ValueId id : n.in)
        if (to != kNoValue && graph[to].buffer == graph[id].buffer) return Recompute::kNever;
  return Recompute::kOtherPhase;
}

// ---- order

void Dataflow::add_dependences() {
  const Graph& g = graph;
  std::vector<std::vector<int32_t>> since_write(g.values.size());  // by buffer: its readers
  // The node that makes a buffer is not in its list: a node that writes to the buffer names a value
  // in it, and exists() makes that node depend on the value's producer.
  int32_t collective = kNoNode;
  for (int32_t k = 0; k < int32_t(g.nodes.size()); ++k) {
    if (is_free(k)) continue;
    const Node& n = g.nodes[size_t(k)];
    auto& waits = before[size_t(k)];
    auto depends = [&](int32_t on) {
      if (on != kNoNode && on != k && !is_free(on)) waits.push_back(on);
    };
    // Views are no nodes that run, so this looks through them to all their operands.
    auto exists = [&](ValueId id, auto&& self) -> void {
      int32_t m = producer[size_t(id)];
      if (m == kNoNode) return;
      if (!is_free(m)) return depends(m);
      for (ValueId operand : g.nodes[size_t(m)].in) self(operand, self);
    };
    auto reads = [&](ValueId id, auto&& self) -> void {
      if (int32_t m = inlined(id, k); m != kNoNode) {
        for (ValueId operand : g.nodes[size_t(m)].in) self(operand, self);
        return;
      }
      exists(id, exists);
      if (g[id].buffer != kNoBuffer) since_write[size_t(g[id].buffer)].push_back(k);
      for (;;) {
        auto& r = readers[size_t(id)];
        if (r.empty() || r.back() != k) r.push_back(k);
        if (!is_view(producer[size_t(id)])) return;
        id = g.nodes[size_t(producer[size_t(id)])].in[0];
      }
    };
    for (auto* list : {&n.in, &n.into})
      for (ValueId id : *list)
        if (id != kNoValue) reads(id, reads);
    for (ValueId id : n.into) {
      if (id == kNoValue) continue;
      auto& looked = since_write[size_t(g[id].buffer)];
      for (int32_t reader : looked) depends(reader);
      looked = {k};
    }
    if (n.role == Role::kCollective) depends(collective), collective = k;
    std::sort(waits.begin(), waits.end());
    waits.erase(std::unique(waits.begin(), waits.end()), waits.end());
    for (int32_t b : waits) after[size_t(b)].push_back(k);
  }
}

}  // namespace tessera::compiler
