// Replaces ops that gain from fusion by the ops they are made of. The formulas here are those of
// the eager kernels, term by term and in the same precision (16-bit floats in f32, rounded at the
// end), so that a decomposed op differs from its kernel only by the order of sums. They read saved
// results (the mean and rstd of a norm), whereas the decompositions of core/ops start from x, since
// they are differentiated again.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "compile/ir/node_writer.h"
#include "compile/ir/rewrite.h"
#include "compile/passes/closed_set.h"
#include "compile/passes/passes.h"
#include "core/base/boundary.h"
#include "core/dispatch/copy.h"
#include "core/ops/create.h"
#include "core/ops/fused_attributes.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/update_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::compiler {
namespace {

using In = std::span<const Tensor>;

DType wide_type(DType t) { return t == kF64 ? kF64 : kF32; }
Tensor wide(const Tensor& t) { return cast(t, wide_type(t.dtype())); }
Tensor over_last(const Tensor& t) { return sum(t, {-1}, true); }

// ---- softmax and its relatives, over the last dim

Tensors softmax(const Primitive&, In in) {
  Tensor x = wide(in[0]), e = exp(x - amax(x, {-1}, true));
  return {cast(e * reciprocal(over_last(e)), in[0].dtype())};
}
Tensors log_softmax(const Primitive&, In in) {
  Tensor x = wide(in[0]), shifted = x - amax(x, {-1}, true);
  return {cast(shifted - log(over_last(exp(shifted))), in[0].dtype())};
}
Tensors softmax_grad(const Primitive&, In in) {
  Tensor y = wide(in[0]), g = wide(in[1]);
  return {cast(y * (g - over_last(g * y)), in[0].dtype())};
}
Tensors log_softmax_grad(const Primitive&, In in) {
  Tensor y = wide(in[0]), g = wide(in[1]);
  return {cast(g - exp(y) * over_last(g), in[0].dtype())};
}

// ---- layer-norm and rms-norm

Tensors norm(const Primitive& prim, In in) {
  const auto& a = attributes_of<NormAttributes>(prim);
  Tensor x = wide(in[0]), mean, centred = x;
  double n = double(x.size(-1));
  Shape rows = x.shape();
  rows[rows.size() - 1] = 1;
  if (a.centred)
    mean = over_last(x) / n, centred = x - mean;
  else
    mean = full(rows, 0.0, {x.dtype(), x.device()});
  Tensor rstd = rsqrt(over_last(square(centred)) / n + a.eps), y = centred * rstd;
  if (a.has_weight) y = y * wide(in[1]);
  if (a.has_bias) y = y + wide(in[a.has_weight ? 2 : 1]);
  return {cast(y, in[0].dtype()), mean, rstd};
}

// With h = (x - mean) rstd and q = g w: dx = rstd (q - mean(q) - h mean(q h)).
Tensors norm_grad(const Primitive& prim, In in) {
  const auto& a = attributes_of<NormAttributes>(prim);
  Tensor g = wide(in[0]), x = wide(in[1]), rstd = in[3];
  double n = double(x.size(-1));
  Tensor h = (a.centred ? x - in[2] : x) * rstd, q = a.has_weight ? g * wide(in[4]) : g;
  Tensor inner = a.centred ? q - over_last(q) / n : q;
  Tensors out{cast(rstd * (inner - h * (over_last(q * h) / n)), in[1].dtype())};
  Dims rows;
  for (int d = 0; d + 1 < x.ndim(); ++d) rows.push_back(d);
  auto over_rows = [&](const Tensor& t) {
    return cast(rows.empty() ? t : sum(t, rows), in[1].dtype());
  };
  if (a.has_weight) out.push_back(over_rows(g * h));
  if (a.has_bias) out.push_back(over_rows(g));
  return out;
}

// ---- optimizer steps: scalars that hold for the whole list of tensors are computed in f64

// Where `scale` is not finite, replaces results by the operands that they update. `lists` are lists
// of `count` tensors each; `kept` names the lists that the results update, in the order of the
// results.
void keep_unless_finite(const Tensor& scale, In lists, int count, std::initializer_list<int> kept,
                        Tensors& results) {
  Tensor finite = isfinite(scale);
  size_t next = 0;
  for (int list : kept)
    for (int i = 0; i < count && next < results.size(); ++i, ++next)
      results[next] = where(finite, results[next], lists[size_t(list * count + i)]);
}

Tensors adam(const Primitive& prim, In in) {
  const auto& a = attributes_of<AdamUpdate>(prim);
  const Tensor &lr = in[0], &step = in[1], &scale = in[2];
  auto correction = [&](double beta) { return 1.0 - pow(full({}, beta, {kF64}), step); };
  Tensor rate = lr / correction(a.beta1), inverse_root = 1.0 / sqrt(correction(a.beta2)),
         keep = 1.0 - lr * a.weight_decay;
  Tensors params, ms, vs;
  for (int i = 0; i < a.count; ++i) {
    auto at = [&](int list) -> const Tensor& { return in[size_t(3 + list * a.count + i)]; };
    const Tensor& p = at(0);
    auto number = [&](const Tensor& t) { return cast(t, p.dtype()); };
    Tensor g = at(1) * number(scale);
    if (!a.decoupled && a.weight_decay != 0) g = g + p * a.weight_decay;
    Tensor m = at(2) * a.beta1 + g * (1 - a.beta1), v = at(3) * a.beta2 + g * (1 - a.beta2) * g;
    Tensor kept = a.decoupled && a.weight_decay != 0 ? p * number(keep) : p;
    params.push_back(kept - number(rate) * m / (sqrt(v) * number(inverse_root) + a.eps));
    ms.push_back(m), vs.push_back(v);
  }
  for (auto* list : {&ms, &vs})
    for (Tensor& t : *list) params.push_back(t);
  if (a.if_finite) keep_unless_finite(scale, in.subspan(3), a.count, {0, 2, 3}, params);
  return params;
}

Tensors sgd(const Primitive& prim, In in) {
  const auto& a = attributes_of<SgdUpdate>(prim);
  Tensors params, buffers;
  for (int i = 0; i < a.count; ++i) {
    auto at = [&](int list) -> const Tensor& { return in[size_t(2 + list * a.count + i)]; };
    const Tensor& p = at(0);
    Tensor g = at(1) * cast(in[1], p.dtype());
    if (a.weight_decay != 0) g = g + p * a.weight_decay;
    if (a.momentum != 0) {
      Tensor b = a.first ? g : at(2) * a.momentum + g * (1 - a.dampening);
      g = a.nesterov ? g + b * a.momentum : b;
      buffers.push_back(b);
    }
    params.push_back(p - cast(in[0], p.dtype()) * g);
  }
  for (Tensor& b : buffers) params.push_back(b);
  if (a.if_finite) keep_unless_finite(in[1], in.subspan(2), a.count, {0, 2}, params);
  return params;
}

// ---- the pass

using Decomposition = Tensors (*)(const Primitive&, In);

Decomposition find(std::string_view op, const DecomposeOptions& o) {
  struct Entry {
    Decomposition run;
    bool DecomposeOptions::*family;
  };
  static const std::unordered_map<std::string_view, Entry> entries = {
      {"softmax", {softmax, &DecomposeOptions::softmax}},
      {"log_softmax", {log_softmax, &DecomposeOptions::softmax}},
      {"softmax_grad", {softmax_grad, &DecomposeOptions::softmax}},
      {"log_softmax_grad", {log_softmax_grad, &DecomposeOptions::softmax}},
      {"layer_norm", {norm, &DecomposeOptions::norms}},
      {"rms_norm", {norm, &DecomposeOptions::norms}},
      {"layer_norm_grad", {norm_grad, &DecomposeOptions::norms}},
      {"rms_norm_grad", {norm_grad, &DecomposeOptions::norms}},
      {"adam", {adam, &DecomposeOptions::optimizers}},
      {"sgd", {sgd, &DecomposeOptions::optimizers}}};
  auto it = entries.find(op);
  return it != entries.end() && o.*it->second.family ? it->second.run : nullptr;
}

class Decomposer {
 public:
  Decomposer(Graph& g, const DecomposeOptions& o) : g_(g), options_(o), rewrite_(g) {
    Uses uses(g);
    for (size_t k = 0; k < g.nodes.size(); ++k) {
      if (!fuses(g.nodes[k])) continue;
      fused_.insert(g.nodes[k].out.begin(), g.nodes[k].out.end());
      for (ValueId id : g.nodes[k].in)  // a fused op reads it, perhaps through views
        for (;;) {
          read_by_fused_.insert(id);
          int32_t m = uses.producer[size_t(id)];
          if (m == kNoNode || !g.nodes[size_t(m)].prim->is_view()) break;
          id = g.nodes[size_t(m)].in[0];
        }
    }
    for (const Node& n : g.nodes)
      if (is_transparent_view(*n.prim) && fused_.contains(n.in[0])) fused_.insert(n.out[0]);
  }

  void run() {
    for (Node& n : g_.nodes) {
      for (ValueId& id : n.in) id = rewrite_.now(id);
      Decomposition d = has_values(n) ? find(n.prim->name(), options_) : nullptr;
      if (d && n.into.empty() && !has_fusible_neighbour(n)) d = nullptr;
      if (d && !n.into.empty() && !worth_kernels(n)) d = nullptr;
      if (d)
        take_apart(n, d);
      else
        nodes_.push_back(std::move(n));
    }
    g_.nodes = std::move(nodes_);
    rewrite_.apply();
  }

 private:
  bool fuses(const Node& n) const {
    return is_elementwise(*n.prim) || as_reduction(*n.prim) || n.prim->name() == "copy" ||
           find(n.prim->name(), options_);
  }
  // Whether a neighbour can be fused with the op. An op alone is best left to its own kernel.
  bool has_fusible_neighbour(const Node& n) const {
    return std::ranges::any_of(n.in, [&](ValueId id) { return fused_.contains(id); }) ||
           std::ranges::any_of(n.out, [&](ValueId id) { return read_by_fused_.contains(id); });
  }

  // Whether an optimizer's step, which writes parameters and their state, is worth generated
  // kernels. On a device it is not: its kernel takes the whole list in one launch.
  bool worth_kernels(const Node& n) const {
    if (!g_[n.out[0]].meta.device.is_cpu()) return false;
    int64_t all = 0;
    for (ValueId id : n.out) all += numel(g_[id].meta.shape);
    meet("decompose.cached", all);
    return all <= kCachedElements && all >= options_.least_elements * int64_t(n.out.size());
  }

  // False for operands without elements: they have no maximum.
  bool has_values(const Node& n) const {
    return std::ranges::all_of(n.in, [&](ValueId id) {
      return g_[id].buffer != kNoBuffer && numel(g_[id].meta.shape) > 0;
    });
  }

  void take_apart(const Node& n, Decomposition d) {
    ValueIds parts;
    {
      NodeWriter writer(g_, nodes_, n);
      Tensors in;
      for (ValueId id : n.in) in.push_back(writer.tensor(id));
      for (const Tensor& t : d(*n.prim, in)) parts.push_back(writer.value(t));
    }
    for (size_t i = 0; i < n.out.size(); ++i) {
      bool effect = i < n.into.size() && n.into[i] != kNoValue;
      if (!effect && stands_for(parts, i, n.out[i]))
        rewrite_.replace(n.out[i], parts[i]);
      else
        nodes_.push_back({.prim = copy_primitive(),
                          .in = {parts[i]},
                          .out = {ValueId(n.out[i])},
                          .into = effect ? ValueIds{ValueId(n.into[i])} : ValueIds{},
                          .phase = n.phase,
                          .scope = n.scope});
    }
  }

  // True if part i has memory of its own and the layout of the result, so that it can replace it.
  bool stands_for(const ValueIds& parts, size_t i, ValueId result) const {
    for (size_t j = 0; j < i; ++j)
      if (parts[j] == parts[i]) return false;
    const Value& part = g_[parts[i]];
    bool made_here = size_t(parts[i]) >= known_;
    return made_here && part.buffer == parts[i] && same_layout(part.meta, g_[result].meta);
  }

  Graph& g_;
  const DecomposeOptions& options_;
  Rewrite rewrite_;
  size_t known_ = g_.values.size();
  // Values that fusible ops make, and those they read.
  std::unordered_set<ValueId> fused_, read_by_fused_;
  std::vector<Node> nodes_;
};

}  // namespace

void decompose(Graph& graph, const DecomposeOptions& options) { Decomposer(graph, options).run(); }
void decompose(Graph& graph) {
  const bool other_sums = !graph.deterministic;
  decompose(graph, {.norms = other_sums, .softmax = other_sums});
}

}  // namespace tessera::compiler
