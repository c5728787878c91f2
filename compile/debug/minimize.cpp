#include "compile/debug/minimize.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "compile/ir/as_strided.h"
#include "compile/ir/interpreter.h"
#include "compile/ir/verify.h"
#include "core/dispatch/backend.h"
#include "core/dispatch/copy.h"

namespace tessera::compiler {
namespace {

// Copies the values of `t` into memory of their own, with the strides of `t`.
Tensor copy_of(const Tensor& t) {
  if (!t.storage()) return t;
  size_t bytes = size_t(extent_of(t.meta(), 0).size) * size_of(t.dtype());
  Tensor c(t.meta(), make_ref<Storage>(bytes, t.device(), cpu_allocator()));
  if (bytes) std::memcpy(c.raw(), t.raw_values(), bytes);
  return c;
}
std::vector<Tensor> copies(std::span<const Tensor> list) {
  std::vector<Tensor> out;
  for (const Tensor& t : list) out.push_back(copy_of(t));
  return out;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) return false;
  if (!a.storage() || !b.storage()) return !a.storage() == !b.storage();
  Tensor x = dense_copy(a), y = dense_copy(b);
  return x.nbytes() == 0 || std::memcmp(x.raw_values(), y.raw_values(), x.nbytes()) == 0;
}

// Returns every value of a graph as it was when it was defined. Each node runs on copies, so that
// nothing outside is written.
std::vector<Tensor> record_values(const Graph& g, std::span<const Tensor> inputs) {
  std::vector<Tensor> value(g.values.size());
  auto at = [&](ValueId id) -> Tensor& { return value[size_t(id)]; };
  for (size_t i = 0; i < inputs.size(); ++i) at(g.inputs[i]) = copy_of(inputs[i]);
  for (const ImplicitInput& i : g.implicit) {
    // Copies the whole memory, since later nodes may read outside of the tensor.
    const Storage& s = *i.tensor.storage();
    auto storage = make_ref<Storage>(s.bytes(), s.device(), cpu_allocator());
    std::memcpy(storage->data(), s.data(), s.bytes());
    at(i.id) = Tensor(i.tensor.meta(), storage, i.tensor.offset());
  }
  for (ValueId id : g.shapes) at(id) = Tensor(g[id].meta, nullptr);
  std::vector<Tensor> recorded(value.size());
  for (size_t i = 0; i < value.size(); ++i)
    if (value[i].defined()) recorded[i] = copy_of(value[i]);
  for (const Node& n : g.nodes) {
    Tensors in, to;
    for (ValueId id : n.in) in.push_back(at(id));
    if (n.into.empty()) {
      to = eager_backend().run(n.prim, in);
    } else {
      for (size_t i = 0; i < n.into.size(); ++i)
        to.push_back(n.into[i] == kNoValue ? empty(g[n.out[i]].meta) : at(n.into[i]));
      eager_backend().assign(to, n.prim, in);
    }
    for (size_t i = 0; i < n.out.size(); ++i) {
      at(n.out[i]) = to[i];
      recorded[size_t(n.out[i])] = copy_of(to[i]);
    }
  }
  return recorded;
}

// Some nodes of a graph as a graph of their own.
class Part {
 public:
  Part(const Graph& g, const std::vector<Tensor>& recorded, const std::vector<bool>& kept)
      : g_(g), recorded_(recorded), new_(g.values.size(), kNoValue) {
    part_.graph.scopes = g.scopes, part_.graph.deterministic = g.deterministic;
    for (size_t k = 0; k < g.nodes.size(); ++k)
      if (kept[k]) add(g.nodes[k]);
    find_outputs(kept);
  }
  Reproducer take() { return std::move(part_); }

 private:
  Graph& graph() { return part_.graph; }

  ValueId use(ValueId id) {
    ValueId& now = new_[size_t(id)];
    if (now != kNoValue) return now;
    const Tensor& t = recorded_[size_t(id)];
    now = ValueId(graph().values.size());
    graph().values.push_back({t.meta(), 0, t.storage() ? now : kNoBuffer});
    if (t.storage())
      graph().inputs.push_back(now), part_.inputs.push_back(t);
    else
      graph().shapes.push_back(now);
    return now;
  }

  void add(const Node& old) {
    Node n = old;
    for (ValueId& id : n.in) id = use(id);
    for (ValueId& id : n.into)
      if (id != kNoValue) id = use(id);
    Tensors views;
    if (n.into.empty() && n.prim->is_view()) {
      Tensors shapes;
      for (ValueId id : n.in)
        shapes.push_back(Tensor(graph()[id].meta, nullptr, graph()[id].offset));
      views = n.prim->view(shapes);
    }
    for (size_t i = 0; i < n.out.size(); ++i) {
      ValueId id = ValueId(graph().values.size());
      Value v{recorded_[size_t(old.out[i])].meta(), 0, id};
      if (!views.empty())
        v = {views[i].meta(), views[i].offset(), graph()[n.in[0]].buffer};
      else if (!n.into.empty() && n.into[i] != kNoValue)
        v = graph()[n.into[i]];
      graph().values.push_back(v);
      new_[size_t(old.out[i])] = id;
      n.out[i] = id;
    }
    graph().nodes.push_back(std::move(n));
  }

  // The outputs are values that are read by the rest of the graph, or by the program, and have not
  // been overwritten by then.
  void find_outputs(const std::vector<bool>& kept) {
    std::vector<bool> wanted(g_.values.size());
    for (ValueId id : g_.outputs) wanted[size_t(id)] = true;
    for (size_t k = 0; k < g_.nodes.size(); ++k)
      if (!kept[k])
        for (auto* list : {&g_.nodes[k].in, &g_.nodes[k].into})
          for (ValueId id : *list)
            if (id != kNoValue) wanted[size_t(id)] = true;
    std::vector<bool> stale(graph().values.size());
    for (const Node& n : graph().nodes)
      for (ValueId to : n.into)
        if (to != kNoValue)
          for (size_t v = 0; v < stale.size(); ++v)
            stale[v] = stale[v] ||
                       (graph().values[v].buffer == graph()[to].buffer && ValueId(v) < n.out[0]);
    for (size_t k = 0; k < g_.nodes.size(); ++k)
      if (kept[k])
        for (ValueId id : g_.nodes[k].out)
          if (ValueId now = new_[size_t(id)];
              wanted[size_t(id)] && !stale[size_t(now)] && graph()[now].buffer != kNoBuffer)
            graph().outputs.push_back(now);
  }

  const Graph& g_;
  const std::vector<Tensor>& recorded_;
  std::vector<ValueId> new_;  // by value of the whole graph
  Reproducer part_;
};

// Says how `run` differs from interpret(); "" where it does not, or where interpret() itself fails.
std::string failure_of(const Reproducer& part, const Runner& run) {
  std::vector<Tensor> expected_in = copies(part.inputs), given = copies(part.inputs);
  Tensors expected;
  try {
    verify(part.graph);
    expected = interpret(part.graph, expected_in);
  } catch (const std::exception&) {
    return "";
  }
  try {
    Tensors got = run(part.graph, given);
    if (got.size() != expected.size())
      return fmt::format("{} outputs, expected {}", got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i)
      if (!same_bits(got[i], expected[i])) return fmt::format("output {} differs", i);
    for (size_t i = 0; i < given.size(); ++i)
      if (!same_bits(given[i], expected_in[i]))
        return fmt::format("what was written to input {} differs", i);
  } catch (const std::exception& e) {
    return fmt::format("throws: {}", e.what());
  }
  return "";
}

}  // namespace

Reproducer minimize(const Graph& g, std::span<const Tensor> inputs, const Runner& run) {
  check_inputs("minimize", g, inputs);
  for (const Node& n : g.nodes)
    TESSERA_CHECK(n.role != Role::kCollective,
                  "minimize: {} talks to other ranks, which would have to take part",
                  n.prim->name());
  const std::vector<Tensor> recorded = record_values(g, inputs);
  std::vector<bool> kept(g.nodes.size(), true);
  Reproducer best = Part(g, recorded, kept).take();
  best.failure = failure_of(best, run);
  TESSERA_CHECK(!best.failure.empty(),
                "minimize: the runner gives the bits of the interpreter on {} nodes",
                g.nodes.size());
  for (size_t chunk = std::max<size_t>(g.nodes.size() / 2, 1);; chunk = (chunk + 1) / 2) {
    bool smaller = false;
    for (size_t end = g.nodes.size(); end > 0;) {
      size_t begin = end;
      std::vector<bool> fewer = kept;
      for (size_t dropped = 0; begin > 0 && dropped < chunk; --begin)
        dropped += fewer[begin - 1], fewer[begin - 1] = false;
      end = begin;
      if (fewer == kept) continue;
      Reproducer part = Part(g, recorded, fewer).take();
      part.failure = failure_of(part, run);
      if (part.failure.empty()) continue;
      best = std::move(part), kept = std::move(fewer), smaller = true;
    }
    if (chunk == 1 && !smaller) return best;
  }
}

std::string to_string(const Reproducer& r) {
  constexpr int64_t kShown = 64;  // elements
  std::string text = fmt::format("{}\n{}", r.failure, to_string(r.graph));
  for (size_t i = 0; i < r.inputs.size(); ++i)
    if (r.inputs[i].numel() <= kShown)
      text += fmt::format("%{} = {}\n", r.graph.inputs[i], tessera::to_string(r.inputs[i]));
  return text;
}

}  // namespace tessera::compiler
