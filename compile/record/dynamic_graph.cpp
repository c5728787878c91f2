#include "compile/record/dynamic_graph.h"

#include <cmath>

#include "compile/ir/rewrite.h"
#include "core/base/error.h"

namespace tessera::compiler {
namespace {

// More bytes than any storage has: views check their extent against it where sizes are not known.
constexpr size_t kUnboundBytes = size_t(1) << 60;

bool is_whole(double x) { return std::abs(x) < 0x1p53 && x == std::floor(x); }

}  // namespace

int64_t Line::at(int64_t a, int64_t b, int64_t size) const {
  if (a == b) return a;
  __int128 rise = __int128(b - a) * (size - size_a);
  TESSERA_CHECK_AS(ShapeError, rise % (size_b - size_a) == 0,
                   "compile: {} at size {} and {} at size {} make no whole number at size {}", a,
                   size_a, b, size_b, size);
  return int64_t(a + rise / (size_b - size_a));
}

std::optional<double> Line::at(double a, double b, int64_t size) const {
  if (a == b) return a;
  if (is_whole(a) && is_whole(b)) return double(at(int64_t(a), int64_t(b), size));
  if (a == 0 || b == 0) return std::nullopt;
  double x = std::round(1 / a), y = std::round(1 / b);
  if (!is_whole(x) || !is_whole(y) || 1 / x != a || 1 / y != b) return std::nullopt;
  int64_t n = at(int64_t(x), int64_t(y), size);
  return n == 0 ? std::nullopt : std::optional(1 / double(n));
}

bool Line::certain(int64_t a, int64_t b) const {
  return a == b || b - a == size_b - size_a || __int128(a) * size_b == __int128(b) * size_a;
}

bool DynamicGraph::certain() const {
  for (const std::optional<Pair>& p : attributes_) {
    if (!p) continue;
    for (size_t i = 0; i < p->a.size(); ++i) {
      const AttributeValue &x = p->a[i].value, &y = p->b[i].value;
      if (auto* v = std::get_if<int64_t>(&x))
        if (!line_.certain(*v, std::get<int64_t>(y))) return false;
      if (auto* v = std::get_if<std::vector<int64_t>>(&x))
        for (size_t d = 0; d < v->size(); ++d)
          if (!line_.certain((*v)[d], std::get<std::vector<int64_t>>(y)[d])) return false;
      if (auto* v = std::get_if<double>(&x)) {
        double r = *v, s = std::get<double>(y);
        bool whole = is_whole(r) && is_whole(s);
        if (r != s &&
            !(whole ? line_.certain(int64_t(r), int64_t(s))
                    : line_.certain(int64_t(std::round(1 / r)), int64_t(std::round(1 / s)))))
          return false;
      }
    }
  }
  return true;
}

// ---- two graphs side by side

std::optional<DynamicGraph> DynamicGraph::unify(const Graph& a, int64_t size_a, const Graph& b,
                                                int64_t size_b, std::string* why) {
  DynamicGraph g(a, b, {size_a, size_b});
  *why = g.find_difference();
  if (!why->empty()) return std::nullopt;
  return g;
}

std::string DynamicGraph::find_difference() {
  const Graph &a = a_, &b = b_;
  if (a.nodes.size() != b.nodes.size())
    return fmt::format("{} ops at size {}, {} at size {}", a.nodes.size(), line_.size_a,
                       b.nodes.size(), line_.size_b);
  if (a.inputs != b.inputs || a.shapes != b.shapes || a.outputs != b.outputs ||
      a.implicit.size() != b.implicit.size() || a.scopes != b.scopes ||
      a.deterministic != b.deterministic)
    return "other inputs, outputs, scopes or mode";
  for (size_t i = 0; i < a.implicit.size(); ++i) {
    const Tensor &s = a.implicit[i].tensor, &t = b.implicit[i].tensor;
    if (a.implicit[i].id != b.implicit[i].id || s.storage() != t.storage() ||
        s.offset() != t.offset() || !same_layout(s.meta(), t.meta()))
      return fmt::format("implicit input %{} is another tensor at each size", a.implicit[i].id);
  }
  for (size_t i = 0; i < a.values.size() && i < b.values.size(); ++i) {
    const Meta &s = a.values[i].meta, &t = b.values[i].meta;
    if (s.shape.size() != t.shape.size() || s.dtype != t.dtype || s.device != t.device)
      return fmt::format("%{} has another type at each size", i);
  }
  for (size_t k = 0; k < a.nodes.size(); ++k)
    if (std::string why = compare(k); !why.empty())
      return fmt::format("{}, in {}", why, to_string(a, a.nodes[k]));
  return "";
}

std::string DynamicGraph::compare(size_t k) {
  const Node &m = a_.nodes[k], &n = b_.nodes[k];
  if (m.prim->id() != n.prim->id())
    return fmt::format("{} at size {}, {} at size {}", m.prim->name(), line_.size_a, n.prim->name(),
                       line_.size_b);
  if (m.in != n.in || m.out != n.out || m.into != n.into || m.phase != n.phase ||
      m.role != n.role || m.scope != n.scope)
    return "other operands at each size";
  attributes_.emplace_back();
  if (same_primitive(*m.prim, *n.prim)) return "";
  Pair pair{attributes_of(*m.prim), attributes_of(*n.prim)};
  if (pair.a.size() != pair.b.size()) return "other attributes at each size";
  for (size_t i = 0; i < pair.a.size(); ++i) {
    const Attribute &x = pair.a[i], &y = pair.b[i];
    bool linear = x.name == y.name && x.value.index() == y.value.index();
    if (auto* s = std::get_if<std::string>(&x.value); linear && s)
      linear = *s == std::get<std::string>(y.value);
    if (auto* r = std::get_if<double>(&x.value); linear && r)
      linear = line_.at(*r, std::get<double>(y.value), line_.size_a).has_value();
    if (auto* d = std::get_if<std::vector<int64_t>>(&x.value); linear && d)
      linear = d->size() == std::get<std::vector<int64_t>>(y.value).size();
    if (!linear) return fmt::format("attribute {} is not linear in the size", x.name);
  }
  attributes_.back() = std::move(pair);
  return "";
}

// ---- one graph at a size

Meta DynamicGraph::meta_at(ValueId id, int64_t size) const {
  const Meta &a = a_[id].meta, &b = b_[id].meta;
  Meta m = a;
  for (int d = 0; d < a.shape.size(); ++d) {
    m.shape[d] = line_.at(a.shape[d], b.shape[d], size);
    TESSERA_CHECK_AS(ShapeError, m.shape[d] >= 0, "compile: %{} has extent {} at size {}", id,
                     m.shape[d], size);
  }
  if (is_contiguous(a.shape, a.strides) && is_contiguous(b.shape, b.strides)) {
    m.strides = contiguous_strides(m.shape);
  } else {
    for (int d = 0; d < a.shape.size(); ++d)
      m.strides[d] = line_.at(a.strides[d], b.strides[d], size);
  }
  return m;
}

PrimRef DynamicGraph::prim_at(size_t node, int64_t size) const {
  const PrimRef& prim = a_.nodes[node].prim;
  if (!attributes_[node]) return prim;
  Attributes now = attributes_[node]->a;
  for (size_t i = 0; i < now.size(); ++i) {
    const AttributeValue& b = attributes_[node]->b[i].value;
    if (auto* v = std::get_if<int64_t>(&now[i].value))
      *v = line_.at(*v, std::get<int64_t>(b), size);
    if (auto* v = std::get_if<double>(&now[i].value)) {
      std::optional<double> x = line_.at(*v, std::get<double>(b), size);
      TESSERA_CHECK_AS(ShapeError, x, "compile: {} of {} has no value at size {}", now[i].name,
                       prim->name(), size);
      *v = *x;
    }
    if (auto* v = std::get_if<std::vector<int64_t>>(&now[i].value))
      for (size_t d = 0; d < v->size(); ++d)
        (*v)[d] = line_.at((*v)[d], std::get<std::vector<int64_t>>(b)[d], size);
  }
  return remake(*prim, now);
}

Graph DynamicGraph::at(int64_t size) const {
  Graph g = a_;
  for (ValueId id : g.inputs) g.values[size_t(id)].meta = meta_at(id, size);
  for (ValueId id : g.shapes) g.values[size_t(id)].meta = meta_at(id, size);
  for (size_t k = 0; k < g.nodes.size(); ++k) g.nodes[k].prim = prim_at(k, size);
  lay_out_values(g);
  for (const Node& n : g.nodes)
    for (ValueId id : n.out) {
      Shape expected = meta_at(id, size).shape;
      TESSERA_CHECK_AS(ShapeError, g[id].meta.shape == expected,
                       "compile: at size {} an op gives {} where the sizes seen say {}, in {}",
                       size, tessera::to_string(g[id].meta.shape), tessera::to_string(expected),
                       to_string(g, n));
    }
  return g;
}

void lay_out_values(Graph& g) {
  std::vector<Ref<Storage>> memory(g.values.size());
  auto tensor = [&](ValueId id) {
    const Value& v = g[id];
    if (v.buffer == kNoBuffer) return Tensor(v.meta, nullptr, v.offset);
    Ref<Storage>& m = memory[size_t(v.buffer)];  // its address identifies the memory
    if (!m) m = make_ref<Storage>(nullptr, kUnboundBytes, v.meta.device, nullptr);
    return Tensor(v.meta, m, v.offset);
  };
  for (Node& n : g.nodes) {
    std::vector<Tensor> in;
    for (ValueId id : n.in) in.push_back(tensor(id));
    if (n.into.empty() && n.prim->is_view()) {
      Tensors views = n.prim->view(in);
      TESSERA_CHECK_AS(ShapeError, views.size() == n.out.size(), "compile: {} gives {} results",
                       n.prim->name(), views.size());
      for (size_t i = 0; i < n.out.size(); ++i)
        g.values[size_t(n.out[i])] = {views[i].meta(), views[i].offset(), g[n.in[0]].buffer};
      continue;
    }
    Metas results;
    if (n.prim->is_view()) {  // an effect that copies
      for (const Tensor& t : n.prim->view(in)) results.push_back(t.meta());
    } else {
      results = planned_results(n.prim, in);
    }
    TESSERA_CHECK_AS(ShapeError, results.size() == n.out.size(), "compile: {} gives {} results",
                     n.prim->name(), results.size());
    for (size_t i = 0; i < n.out.size(); ++i) {
      Value& v = g.values[size_t(n.out[i])];
      if (!n.into.empty() && n.into[i] != kNoValue) {
        v = g[n.into[i]];
        TESSERA_CHECK_AS(ShapeError, v.meta.shape == results[i].shape,
                         "compile: {} does not fit its destination", to_string(g, n));
      } else {
        v = {results[i], 0, n.out[i]};
      }
    }
  }
}

}  // namespace tessera::compiler
