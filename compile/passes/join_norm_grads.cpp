// Lets the gradient of a convolution's input give what the derivative of the batch-norm in front of
// it sums, on devices that have such a kernel (conv_grad_norm): these mask by the relu and sum what
// they store, together with another gradient of the same value, so that passes over it are saved.
// Invariant: only the places of roundings and the order of sums change.
#include <algorithm>

#include "compile/ir/rewrite.h"
#include "compile/passes/passes.h"
#include "core/dispatch/kernel.h"
#include "core/ops/batch_norm_stats.h"
#include "core/ops/conv_grad_norm.h"
#include "core/primitive/primitive_of.h"

namespace tessera::compiler {
namespace {

class NormGradJoiner {
 public:
  explicit NormGradJoiner(Graph& g) : g_(g), uses_(g), place_(uses_.producer) {}

  void run() {
    for_each(g_, "batch_norm_grad", [&](int32_t k) { join(k); });
    Rewrite(g_).apply();
  }

 private:
  // The node that makes a gradient which only node `reader` reads, and which is no output.
  int32_t maker(ValueId id, int32_t reader) const {
    const auto& readers = uses_.readers[size_t(id)];
    const bool alone = std::ranges::all_of(readers, [&](int32_t r) { return r == reader; }) &&
                       !uses_.output[size_t(id)] && g_[id].buffer == id;
    return alone ? uses_.producer[size_t(id)] : kNoNode;
  }
  bool is_gradient(int32_t k) const {
    return k != kNoNode && is(g_.nodes[size_t(k)], "conv_grad_input");
  }

  // The gradient of a convolution that node `k` adds to `other`: of two the one without strides,
  // which devices more often have a kernel for.
  int32_t addend(const Node& add, int32_t k, ValueId& other) const {
    int32_t found = kNoNode;
    for (size_t i : {0, 1}) {
      const int32_t conv = maker(add.in[i], k);
      if (!is_gradient(conv) || (found != kNoNode && is_strided(conv))) continue;
      found = conv, other = add.in[1 - i];
    }
    return found;
  }
  bool is_strided(int32_t conv) const {
    const auto& a = attributes_of<ConvAttributes>(*g_.nodes[size_t(conv)].prim);
    return std::ranges::any_of(a.window.stride, [](int64_t s) { return s != 1; });
  }

  // The sums are made where the convolution's gradient is, or its sum with another one, and
  // batch-norm's derivative applies them.
  void join(int32_t k) {
    Node& norm = g_.nodes[size_t(k)];
    const auto [eps, form] = attributes_of<BatchNormAttributes>(*norm.prim);
    const ValueId g = norm.in[0];
    const Meta meta = g_[g].meta;
    const int32_t last = maker(g, k);
    int32_t conv = last;
    ValueId other = kNoValue;
    if (last != kNoNode && is(g_.nodes[size_t(last)], "add"))
      conv = addend(g_.nodes[size_t(last)], last, other);
    if (!is_gradient(conv)) return;
    const Node& gradient = g_.nodes[size_t(conv)];
    if (other != kNoValue && (other == gradient.out[0] || !same_layout(g_[other].meta, meta) ||
                              !same_layout(g_[gradient.out[0]].meta, meta)))
      return;
    const PrimRef joined =
        conv_grad_norm_op({attributes_of<ConvAttributes>(*gradient.prim),
                           {eps, {form.weight, form.bias, other != kNoValue, form.relu}}});
    if ((meta.dtype != kF16 && meta.dtype != kBF16) ||
        !kernel_table().find(meta.device.kind, joined->id()))
      return;
    const size_t channels = form.residual ? 2 : 1;  // where results with one value a channel begin
    for (size_t i = channels; i < norm.out.size(); ++i)
      if (g_[norm.out[i]].meta.dtype != kF32) return;

    Node sums = gradient;
    sums.prim = joined;
    for (size_t i : {1, 2, 3}) sums.in.push_back(norm.in[i]);
    if (form.relu) sums.in.push_back(norm.in.back());
    if (other != kNoValue) sums.in.push_back(other);
    for (ValueId id : sums.in)
      if (place_[size_t(id)] >= last) return;
    if (!operands_unchanged(g_, sums, conv, last)) return;
    const Meta mean = Meta::contiguous({meta.shape[1]}, kF32, meta.device);
    // What the residual's gradient is: the masked gradient itself.
    const ValueId h = form.residual ? norm.out[1] : g, of_g = add(mean), of_gx = add(mean);
    sums.out = {h, of_g, of_gx};
    for (size_t i = channels; i < norm.out.size(); ++i) sums.out.push_back(norm.out[i]);
    for (ValueId id : sums.out) place_[size_t(id)] = last;

    ValueIds in{h, norm.in[1], norm.in[2], norm.in[3], of_g, of_gx};
    if (form.weight) in.push_back(norm.in[4]);
    norm.prim = batch_norm_grad_apply_op({eps, {.weight = form.weight}});
    norm.in = std::move(in);
    norm.out = {ValueId(norm.out[0])};
    g_.nodes[size_t(conv)].prim = {};
    g_.nodes[size_t(last)] = std::move(sums);
  }
  ValueId add(const Meta& meta) {
    const auto id = ValueId(g_.values.size());
    g_.values.push_back({meta, 0, id});
    place_.push_back(kNoNode);
    return id;
  }

  Graph& g_;
  const Uses uses_;             // of the graph as it was
  std::vector<int32_t> place_;  // of each value: the node that makes it
};

}  // namespace

void join_norm_grads(Graph& graph) {
  if (!graph.deterministic) NormGradJoiner(graph).run();
}

}  // namespace tessera::compiler
