#include "compile/ir/rewrite.h"

#include <algorithm>

#include "core/dispatch/plan_cache.h"

namespace tessera::compiler {

Uses::Uses(const Graph& g)
    : producer(g.values.size(), kNoNode), readers(g.values.size()), output(g.values.size()) {
  for (size_t k = 0; k < g.nodes.size(); ++k) {
    const Node& n = g.nodes[k];
    for (auto* list : {&n.in, &n.into})
      for (ValueId id : *list) {
        if (id == kNoValue) continue;
        auto& r = readers[size_t(id)];
        if (r.empty() || r.back() != int32_t(k)) r.push_back(int32_t(k));
      }
    for (ValueId id : n.out) producer[size_t(id)] = int32_t(k);
  }
  for (ValueId id : g.outputs) output[size_t(id)] = true;
}

std::vector<MemoryUse> memory_uses(const Graph& g) {
  std::vector<MemoryUse> uses(g.values.size());
  auto of = [&](ValueId id) -> MemoryUse* {
    ValueId buffer = id == kNoValue ? kNoBuffer : g[id].buffer;
    return buffer == kNoBuffer ? nullptr : &uses[size_t(buffer)];
  };
  for (ValueId id : g.inputs) of(id)->external = true;
  for (const ImplicitInput& i : g.implicit) of(i.id)->external = true;
  for (size_t k = 0; k < g.nodes.size(); ++k) {
    const Node& n = g.nodes[k];
    for (auto* list : {&n.in, &n.into})
      for (ValueId id : *list)
        if (MemoryUse* m = of(id)) m->last_read = int32_t(k);
    for (ValueId id : n.into)
      if (MemoryUse* m = of(id); m && (m->writes.empty() || m->writes.back() != int32_t(k)))
        m->writes.push_back(int32_t(k));
  }
  std::vector<ValueId> outputs(g.outputs.begin(), g.outputs.end());
  std::sort(outputs.begin(), outputs.end());
  outputs.erase(std::unique(outputs.begin(), outputs.end()), outputs.end());
  for (ValueId id : outputs)
    if (MemoryUse* m = of(id)) ++m->outputs, m->last_read = int32_t(g.nodes.size());
  return uses;
}

bool is_effect(const Node& n) {
  return std::ranges::any_of(n.into, [](ValueId id) { return id != kNoValue; });
}

Tensor shape_of(const Graph& g, ValueId id) { return Tensor(g[id].meta, nullptr, g[id].offset); }

Metas planned_results(const PrimRef& prim, std::span<const Tensor> in) {
  return PlanCache::plan_for_thread(prim, find_kernel(*prim, device_of(*prim, in)), in).out;
}

// ---- replacing values

Rewrite::Rewrite(Graph& graph)
    : graph_(graph), by_(graph.values.size(), kNoValue), memory_(memory_uses(graph)) {}

ValueId Rewrite::now(ValueId id) const {
  while (id != kNoValue && size_t(id) < by_.size() && by_[size_t(id)] != kNoValue)
    id = by_[size_t(id)];
  return id;
}

bool Rewrite::try_alias(ValueId id, ValueId by, int32_t at) {
  const Graph& g = graph_;
  const Value &v = g[id], &u = g[by];
  if (u.buffer == kNoBuffer || v.buffer != id || !same_layout(v.meta, u.meta)) return false;
  ValueId home = u.buffer;  // it changed if the value that made it was replaced
  while (now(home) != home) home = g[now(home)].buffer;
  MemoryUse &gone = memory_[size_t(id)], &kept = memory_[size_t(home)];
  if (!gone.writes.empty()) return false;
  for (int32_t w : kept.writes)
    if (w > at && gone.last_read > w) return false;
  if (gone.outputs > 0) {
    bool whole = u.offset == g[home].offset && numel(u.meta.shape) == numel(g[home].meta.shape);
    if (kept.external || kept.outputs > 0 || !whole) return false;
    for (int32_t w : kept.writes)
      if (w > at) return false;
  }
  kept.outputs += gone.outputs;
  kept.last_read = std::max(kept.last_read, gone.last_read);
  replace(id, by);
  return true;
}

void Rewrite::apply() {
  Graph& g = graph_;
  for (Node& n : g.nodes) {
    for (auto* list : {&n.in, &n.into})
      for (ValueId& id : *list) id = now(id);
  }
  for (ValueId& id : g.outputs) id = now(id);
  std::erase_if(g.nodes, [](const Node& n) { return !n.prim; });

  std::vector<ValueId> number(g.values.size(), kNoValue);
  std::vector<Value> values;
  auto define = [&](ValueId& id) {
    number[size_t(id)] = ValueId(values.size());
    values.push_back(g[id]);
    id = number[size_t(id)];
    if (values.back().buffer != kNoBuffer) values.back().buffer = id;
  };
  std::vector<bool> used(g.values.size());
  for (const Node& n : g.nodes)
    for (ValueId id : n.in) used[size_t(id)] = true;
  std::erase_if(g.shapes, [&](ValueId id) { return !used[size_t(id)]; });
  for (ValueId& id : g.inputs) define(id);
  for (ImplicitInput& i : g.implicit) define(i.id);
  for (ValueId& id : g.shapes) define(id);
  for (Node& n : g.nodes) {
    for (auto* list : {&n.in, &n.into})
      for (ValueId& id : *list) {
        if (id == kNoValue) continue;
        TESSERA_ASSERT(number[size_t(id)] != kNoValue, "rewrite: {} reads what is made after it",
                       n.prim->name());
        id = number[size_t(id)];
      }
    for (ValueId& id : n.out) define(id);
    auto lies_in = [&](ValueId id, ValueId memory, int64_t offset) {
      values[size_t(id)].buffer = values[size_t(memory)].buffer, values[size_t(id)].offset = offset;
    };
    if (n.prim->is_view() && n.into.empty()) {
      Tensors shapes;
      for (ValueId id : n.in)
        shapes.push_back(Tensor(values[size_t(id)].meta, nullptr, values[size_t(id)].offset));
      Tensors views = n.prim->view(shapes);
      for (size_t i = 0; i < n.out.size(); ++i) lies_in(n.out[i], n.in[0], views[i].offset());
    }
    for (size_t i = 0; i < n.into.size(); ++i)
      if (n.into[i] != kNoValue) lies_in(n.out[i], n.into[i], values[size_t(n.into[i])].offset);
  }
  for (ValueId& id : g.outputs) id = number[size_t(id)];
  g.values = std::move(values);
}

bool is(const Node& n, std::string_view op) {
  return n.prim && n.prim->name() == op && n.into.empty();
}

int32_t maker(const Graph& graph, const Uses& uses, ValueId id, std::string_view op) {
  const int32_t k = uses.producer[size_t(id)];
  return k != kNoNode && is(graph.nodes[size_t(k)], op) ? k : kNoNode;
}

bool operands_unchanged(const Graph& g, const Node& node, int32_t from, int32_t to) {
  for (int32_t w = from + 1; w < to; ++w)
    for (ValueId id : g.nodes[size_t(w)].into)
      for (ValueId operand : node.in)
        if (id != kNoValue && g[id].buffer == g[operand].buffer) return false;
  return true;
}

}  // namespace tessera::compiler
