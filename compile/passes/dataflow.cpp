#include "compile/passes/dataflow.h"

#include <algorithm>

#include "compile/passes/closed_set.h"
#include "compile/rewrite.h"

namespace tessera::compile {
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

bool has_elements(const Graph& g, const Node& n) {
  for (auto* list : {&n.in, &n.out})
    for (ValueId id : *list)
      if (g[id].buffer == kNoBuffer || numel(g[id].meta.shape) == 0 || !g[id].meta.device.is_cpu())
        return false;
  return true;
}

// No two elements in one place.
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
  std::string_view op = n.prim->name();
  if (n.into.empty() && (op == "full" || op == "arange") &&
      memory[size_t(n.out[0])].writes.empty() && has_elements(g, n))
    return NodeKind::kNumber;
  bool fits = is_elementwise(*n.prim) || op == "copy" || as_reduction(*n.prim);
  if (!fits || n.out.size() != 1 || !has_elements(g, n) || !is_injective(g[n.out[0]].meta) ||
      may_trap(*n.prim, g[n.in[0]].meta.dtype))
    return NodeKind::kOther;
  return NodeKind::kFusible;
}

}  // namespace

int32_t Dataflow::source(ValueId id) const {
  int32_t m = maker[size_t(id)];
  while (m != kNoNode &&
         (kind[size_t(m)] == NodeKind::kTransparent || kind[size_t(m)] == NodeKind::kOpaque))
    id = graph.nodes[size_t(m)].in[0], m = maker[size_t(id)];
  return m;
}

Dataflow::Dataflow(const Graph& g)
    : graph(g),
      kind(g.nodes.size()),
      axes(g.nodes.size()),
      before(g.nodes.size()),
      after(g.nodes.size()),
      maker(g.values.size(), kNoNode),
      readers(g.values.size()),
      is_output(g.values.size()) {
  std::vector<MemoryUse> memory = memory_uses(g);
  for (size_t k = 0; k < g.nodes.size(); ++k) {
    const Node& n = g.nodes[k];
    kind[k] = kind_of(g, n, memory);
    if (kind[k] == NodeKind::kFusible || kind[k] == NodeKind::kTransparent)
      axes[k] = n.prim->axes(metas_of(g, n));
    for (ValueId id : n.out) maker[size_t(id)] = int32_t(k);
  }

  // Values that `id` is seen through, itself first.
  auto chain = [&](ValueId id, auto visit) {
    for (;;) {
      visit(id);
      int32_t m = maker[size_t(id)];
      bool view = m != kNoNode && is_free(m) && kind[size_t(m)] != NodeKind::kNumber;
      if (!view) return;
      id = g.nodes[size_t(m)].in[0];
    }
  };
  for (ValueId id : g.outputs) chain(id, [&](ValueId v) { is_output[size_t(v)] = true; });

  std::vector<std::vector<int32_t>> since_write(g.values.size());  // by buffer: who looked at it
  int32_t collective = kNoNode;
  for (size_t k = 0; k < g.nodes.size(); ++k) {
    if (is_free(int32_t(k))) continue;
    const Node& n = g.nodes[k];
    auto depends = [&](int32_t on) {
      if (on != kNoNode && on != int32_t(k) && !is_free(on)) before[k].push_back(on);
    };
    // Every operand of the views on the way has to exist.
    auto depends_on_value = [&](ValueId id, auto&& self) -> void {
      int32_t m = maker[size_t(id)];
      if (m == kNoNode) return;
      if (!is_free(m)) return depends(m);
      for (ValueId operand : g.nodes[size_t(m)].in) self(operand, self);
    };
    for (auto* list : {&n.in, &n.into})
      for (ValueId id : *list) {
        if (id == kNoValue) continue;
        depends_on_value(id, depends_on_value);
        chain(id, [&](ValueId v) {
          auto& r = readers[size_t(v)];
          if (r.empty() || r.back() != int32_t(k)) r.push_back(int32_t(k));
        });
      }
    for (ValueId id : n.into) {
      if (id == kNoValue) continue;
      auto& looked = since_write[size_t(g[id].buffer)];
      for (int32_t reader : looked) depends(reader);
      looked = {int32_t(k)};
    }
    for (auto* list : {&n.in, &n.out})
      for (ValueId id : *list)
        if (g[id].buffer != kNoBuffer) since_write[size_t(g[id].buffer)].push_back(int32_t(k));
    if (n.role == Role::kCollective) depends(collective), collective = int32_t(k);
    std::sort(before[k].begin(), before[k].end());
    before[k].erase(std::unique(before[k].begin(), before[k].end()), before[k].end());
    for (int32_t b : before[k]) after[size_t(b)].push_back(int32_t(k));
  }
}

}  // namespace tessera::compile
