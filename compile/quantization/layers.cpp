#include "compile/quantization/layers.h"

#include <algorithm>
#include <set>

#include "compile/ir/rewrite.h"
#include "compile/record/trace.h"
#include "core/autograd/autograd.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/contract_attributes.h"
#include "core/ops/pointwise.h"
#include "core/ops/pool_attributes.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

namespace tessera::quant {
namespace {

using compiler::kNoNode;
using compiler::Uses;

class Finder {
 public:
  Finder(Layers& found, std::span<const std::string> keep_f32)
      : f_(found), g_(found.graph), uses_(g_), keep_f32_(keep_f32) {}

  void run() {
    f_.constant.resize(g_.values.size());
    f_.absorbed.resize(g_.nodes.size());
    f_.layer_at.assign(g_.nodes.size(), -1);
    f_.root.assign(g_.values.size(), kNoValue);
    for (const Node& n : g_.nodes)
      for (ValueId id : n.into)
        TESSERA_CHECK(id == kNoValue,
                      "quantization: {} writes memory in a forward; a quantized model computes its "
                      "result and nothing else (is the model in eval mode?)",
                      n.prim->name());
    fold_constants();
    for (const Node& n : g_.nodes)
      if (Layer layer; !is_constant(n) && is_layer(n, layer)) {
        fed_.insert(n.in[0]);
        paths_.insert(path_of(n));
      }
    for (size_t k = 0; k < g_.nodes.size(); ++k)
      if (!f_.absorbed[k] && !is_constant(g_.nodes[k])) find_layer(int32_t(k));
    find_bytes();
  }

 private:
  const Tensor& constant(ValueId id) const { return f_.constant[size_t(id)]; }
  bool is_constant(const Node& n) const { return constant(n.out[0]).defined(); }

  // Evaluates once everything that follows from parameters alone.
  void fold_constants() {
    for (const compiler::ImplicitInput& i : g_.implicit) f_.constant[size_t(i.id)] = i.tensor;
    for (const Node& n : g_.nodes) {
      Tensors in;
      for (ValueId id : n.in)
        if (constant(id).defined()) in.push_back(constant(id));
      if (in.size() != n.in.size()) continue;
      Tensors out = dispatch(n.prim, in);
      for (size_t i = 0; i < n.out.size(); ++i) f_.constant[size_t(n.out[i])] = out[i];
    }
  }

  // ---- layers

  void find_layer(int32_t k) {
    const Node& n = g_.nodes[size_t(k)];
    Layer layer;
    if (!is_layer(n, layer)) return;
    const std::string name = name_of_layer(n);
    layer.name = unique(name, name == path_of(n));
    // Names every call of the layer, or one of them.
    for (const std::string& named : {name, layer.name})
      if (std::ranges::count(keep_f32_, named)) {
        if (!std::ranges::count(f_.kept, named)) f_.kept.push_back(named);
        return;
      }
    layer.bias = Tensor();
    layer.y = n.out[0];
    std::vector<int32_t> nodes{k};
    while (absorb_next(layer, nodes)) {
    }
    for (int32_t node : nodes) f_.absorbed[size_t(node)] = true;
    f_.layer_at[size_t(nodes.back())] = int(f_.layers.size());
    const int64_t channels = layer.weight.shape()[0];
    if (!layer.bias.defined())
      layer.bias = from_values<double>(std::vector<double>(size_t(channels)), {channels});
    layer.weight = cast(layer.weight, kF32).contiguous(), layer.bias = cast(layer.bias, kF32);
    f_.layers.push_back(std::move(layer));
  }

  bool is_layer(const Node& n, Layer& layer) const {
    if (n.prim->name() == "conv") return is_conv(n, layer);
    return n.prim->name() == "contract" && is_linear(n, layer);
  }
  bool is_conv(const Node& n, Layer& layer) const {
    const Tensor& w = constant(n.in[1]);
    if (!w.defined() || w.dtype() != kF32) return false;
    const auto& a = attributes_of<ConvAttributes>(*n.prim);
    for (int64_t p : a.window.pad_end)
      if (p < 0) return false;
    layer.window = a.window, layer.x = n.in[0], layer.weight = cast(w, kF64);
    return true;
  }

  // x [.., k] w [n, k] -> [.., n], or w [k, n].
  bool is_linear(const Node& n, Layer& layer) const {
    const auto& c = attributes_of<ContractAttributes>(*n.prim);
    const Tensor& w = constant(n.in[1]);
    if (!w.defined() || w.dtype() != kF32 || c.leaves || c.b.size() != 2 || c.a.size() < 1 ||
        c.out.size() != c.a.size())
      return false;
    const char k = c.a.back(), o = c.out.back();
    if (c.a.substr(0, c.a.size() - 1) != c.out.substr(0, c.out.size() - 1) || k == o) return false;
    const bool rows = c.b[0] == o && c.b[1] == k, columns = c.b[0] == k && c.b[1] == o;
    if (!rows && !columns) return false;
    layer.linear = true, layer.x = n.in[0];
    layer.weight = cast(rows ? w : transpose(w, 0, 1), kF64);
    return true;
  }

  // The name under which the model holds the layer's weight; "" for a weight that was computed.
  std::string path_of(const Node& n) const {
    std::string name;
    for (const compiler::ImplicitInput& i : g_.implicit)
      if (g_[n.in[1]].buffer == i.id) name = i.name;
    if (name.ends_with(".weight")) name.resize(name.size() - 7);
    return name;
  }
  std::string name_of_layer(const Node& n) const {
    std::string name = path_of(n);
    if (name.empty()) name = g_.scopes[size_t(n.scope)];
    return name.empty() ? std::string(n.prim->name()) : name;
  }
  // Returns `name`, with a number appended if it is taken. `is_path`: the name is a weight's path
  // in the model, which stays reserved for that layer.
  std::string unique(const std::string& name, bool is_path) {
    std::string made = name;
    for (int k = 2; names_.contains(made) || (paths_.contains(made) && !(is_path && made == name));
         ++k)
      made = fmt::format("{}_{}", name, k);
    names_.insert(made);
    return made;
  }

  // Returns a constant that the layer's channels are multiplied by or added to: one value for each
  // channel, or one for all. Nothing if `id` is not such a constant.
  std::optional<Tensor> by_channel(const Layer& layer, ValueId id) const {
    const Tensor& t = constant(id);
    if (!t.defined() || !is_floating(t.dtype())) return std::nullopt;
    const int64_t channels = layer.weight.shape()[0];
    const int ndim = g_[layer.y].meta.shape.size(), at = (layer.linear ? ndim - 1 : 1);
    if (t.numel() != 1) {
      const int d = at - (ndim - t.ndim());
      if (d < 0 || t.shape()[d] != channels || t.numel() != channels) return std::nullopt;
    }
    return cast(expand(reshape(t, {-1}), {channels}), kF64);
  }
  void scale(Layer& layer, const Tensor& by) {
    Shape s = Dims::filled(layer.weight.ndim(), 1);
    s[0] = by.numel();
    layer.weight = layer.weight * reshape(by, s);
    if (layer.bias.defined()) layer.bias = layer.bias * by;
    layer.folded = true;
  }
  static void shift(Layer& layer, const Tensor& by) {
    layer.bias = layer.bias.defined() ? layer.bias + by : by;
  }

  // Absorbs the only reader of the layer's value into the layer; returns whether it could.
  bool absorb_next(Layer& layer, std::vector<int32_t>& nodes) {
    const auto& readers = uses_.readers[size_t(layer.y)];
    if (uses_.output[size_t(layer.y)] || readers.size() != 1 || layer.relu) return false;
    const Node& n = g_.nodes[size_t(readers[0])];
    if (f_.absorbed[size_t(readers[0])] || n.out.size() != 1 ||
        !(g_[n.out[0]].meta.shape == g_[layer.y].meta.shape) || g_[n.out[0]].meta.dtype != kF32 ||
        !absorb(layer, n))
      return false;
    layer.y = n.out[0];
    nodes.push_back(readers[0]);
    return true;
  }
  bool absorb(Layer& layer, const Node& n) {
    const std::string_view op = n.prim->name();
    if (op == "relu") return layer.relu = true;
    if (op == "cast") return true;  // f32 to f32
    if (n.in.size() < 2) return false;
    const bool first = n.in[0] == layer.y;
    const ValueId other = n.in[first ? 1 : 0];
    if (layer.residual == kNoValue) {
      if (auto by = by_channel(layer, other)) {
        if (op == "add") return shift(layer, *by), true;
        if (op == "sub" && first) return shift(layer, -*by), true;
        if (op == "mul") return scale(layer, *by), true;
        if (op == "mul_add" && n.in[2] != layer.y)
          if (auto more = by_channel(layer, n.in[2]))
            return scale(layer, *by), shift(layer, *more), true;
        return false;
      }
      if (op == "add" && other != layer.y && is_bytes_anyway(other) &&
          g_[other].meta.shape == g_[layer.y].meta.shape && g_[other].meta.dtype == kF32) {
        layer.residual = other;
        return true;
      }
    }
    return false;
  }

  // A residual is rounded to bytes only if a layer reads it as bytes too, or if a layer made it,
  // which then writes bytes. Others (the residual stream of a transformer) are added in f32.
  bool is_bytes_anyway(ValueId id) const {
    if (constant(id).defined()) return false;
    if (fed_.contains(id)) return true;
    while (true) {
      const int32_t k = uses_.producer[size_t(id)];
      if (k == kNoNode) return false;
      const Node& n = g_.nodes[size_t(k)];
      if (Layer layer; is_layer(n, layer)) return true;
      ValueId varying = kNoValue;
      for (ValueId in : n.in)
        if (!constant(in).defined()) {
          if (varying != kNoValue) return false;
          varying = in;
        }
      const std::string_view op = n.prim->name();
      if (op != "add" && op != "sub" && op != "mul" && op != "mul_add" && op != "relu")
        return false;
      id = varying;
    }
  }

  // ---- values that are bytes

  void find_bytes() {
    std::vector<bool> wanted(g_.values.size());
    for (const Layer& l : f_.layers) {
      wanted[size_t(l.x)] = true;
      if (l.residual != kNoValue) wanted[size_t(l.residual)] = true;
    }
    for (size_t k = g_.nodes.size(); k-- > 0;) {
      const Node& n = g_.nodes[k];
      if (!f_.absorbed[k] && wanted[size_t(n.out[0])] && passes(n)) wanted[size_t(n.in[0])] = true;
    }
    for (ValueId id : g_.inputs) make_root(id, wanted, "input");
    for (size_t k = 0; k < g_.nodes.size(); ++k) {
      const Node& n = g_.nodes[k];
      const int layer = f_.layer_at[k];
      if (layer >= 0)
        make_root(f_.layers[size_t(layer)].y, wanted, f_.layers[size_t(layer)].name);
      else if (!f_.absorbed[k] && wanted[size_t(n.out[0])] && passes(n))
        f_.root[size_t(n.out[0])] = f_.root[size_t(n.in[0])];
      else if (!f_.absorbed[k] && wanted[size_t(n.out[0])])
        make_root(n.out[0], wanted, scoped_name(n));
    }
  }
  bool passes(const Node& n) const {
    return !is_constant(n) && passes_bytes(n, g_) &&
           (n.out.size() == 1 ||
            (uses_.readers[size_t(n.out[1])].empty() && !uses_.output[size_t(n.out[1])]));
  }
  std::string scoped_name(const Node& n) const {
    const std::string& scope = g_.scopes[size_t(n.scope)];
    return (scope.empty() ? "" : scope + ".") + std::string(n.prim->name());
  }
  void make_root(ValueId id, const std::vector<bool>& wanted, const std::string& name) {
    if (!wanted[size_t(id)]) return;
    f_.root[size_t(id)] = id;
    const bool of_layer = std::ranges::any_of(f_.layers, [&](auto& l) { return l.y == id; });
    f_.roots.push_back({id, of_layer ? name : unique(name, false)});
  }

  Layers& f_;
  const Graph& g_;
  Uses uses_;
  std::span<const std::string> keep_f32_;
  // Names given so far; paths of the weights that layers have.
  std::set<std::string> names_, paths_;
  std::set<ValueId> fed_;  // values that layers read
};

}  // namespace

bool passes_bytes(const Node& n, const Graph& g) {
  if (g[n.in.empty() ? 0 : n.in[0]].meta.dtype != kF32 || n.in.size() != 1) return false;
  if (n.prim->name() == "max_pool") return !attributes_of<PoolAttributes>(*n.prim).windows.adaptive;
  return n.prim->is_view() || n.prim->name() == "copy" || n.prim->name() == "relu";
}

Layers find_layers(FunctionRef<Tensor(const Tensor&)> forward, const Tensor& given,
                   std::vector<NamedTensor> names, std::span<const std::string> keep_f32) {
  NoGrad no_history;
  Layers found;
  const Tensor x = given.detach();
  compiler::Trace trace({.inputs = {x}, .names = std::move(names)});
  const Tensor y = forward(x);
  found.graph = trace.finish({y});
  Finder(found, keep_f32).run();
  return found;
}

Tensor run_observed(const Layers& layers, const Tensor& x,
                    FunctionRef<void(const Root&, const Tensor&)> see) {
  NoGrad no_history;
  const Graph& g = layers.graph;
  std::vector<Tensor> value = layers.constant;
  std::vector<size_t> last(g.values.size(), 0);
  for (size_t k = 0; k < g.nodes.size(); ++k)
    for (ValueId id : g.nodes[k].in) last[size_t(id)] = k;
  std::vector<int> root_of(g.values.size(), -1);
  for (size_t i = 0; i < layers.roots.size(); ++i) root_of[size_t(layers.roots[i].value)] = int(i);
  auto set = [&](ValueId id, Tensor t) {
    if (int r = root_of[size_t(id)]; r >= 0) see(layers.roots[size_t(r)], t);
    value[size_t(id)] = std::move(t);
  };
  for (ValueId id : g.shapes) value[size_t(id)] = Tensor(g[id].meta, nullptr);
  set(g.inputs[0], x.detach());
  for (size_t k = 0; k < g.nodes.size(); ++k) {
    const Node& n = g.nodes[k];
    if (layers.constant[size_t(n.out[0])].defined()) continue;
    Tensors in;
    for (ValueId id : n.in) in.push_back(value[size_t(id)]);
    for (ValueId id : n.in)
      if (last[size_t(id)] == k && id != g.outputs[0]) value[size_t(id)] = {};
    Tensors out = dispatch(n.prim, in);
    for (size_t i = 0; i < n.out.size(); ++i) set(n.out[i], std::move(out[i]));
  }
  return value[size_t(g.outputs[0])];
}

}  // namespace tessera::quant
