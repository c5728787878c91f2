// Makes one op of a product and the bias that is added to it, on devices whose products add one for
// nothing: a pass over the result is saved. Invariant: only the place of a rounding changes, since
// the bias is added before the product is rounded to 16 bits.
#include "compile/ir/rewrite.h"
#include "compile/passes/passes.h"
#include "core/ops/contract_epilogues.h"
#include "core/ops/scaled_matmul.h"
#include "core/primitive/primitive_of.h"
#include "core/tensor/device_runtime.h"

namespace tessera::compiler {
namespace {

class BiasJoiner {
 public:
  explicit BiasJoiner(Graph& g) : g_(g), uses_(g) {}

  void run() {
    for_each(g_, "add", [&](int32_t k) { join(k); });
    Rewrite(g_).apply();
  }

 private:
  /// What the product at node `k` is with a bias; null where there is none that takes one.
  PrimRef with_bias(int32_t k) const {
    if (k == kNoNode) return nullptr;
    const Node& n = g_.nodes[size_t(k)];
    if (!n.prim || !n.into.empty()) return nullptr;
    const Meta& m = g_[n.out[0]].meta;
    const bool joins = runtime_of(m.device).has_epilogues() && is_floating(m.dtype) &&
                       m.dtype != kF64;  // whose products are joined with nothing
    if (!joins) return nullptr;
    if (n.prim->name() != "contract") return scaled_matmul_with_bias(*n.prim);
    const auto& c = attributes_of<ContractAttributes>(*n.prim);
    return may_add_bias(c) ? contract_bias_op(c) : nullptr;
  }

  // The product moves to the place of the addition, since the bias may be made in between.
  void join(int32_t k) {
    Node& add = g_.nodes[size_t(k)];
    for (size_t i : {size_t(0), size_t(1)}) {
      const ValueId product = add.in[i], bias = add.in[1 - i];
      const int32_t at = uses_.producer[size_t(product)];
      const PrimRef joined = with_bias(at);
      const Meta &p = g_[product].meta, &b = g_[bias].meta, &sum = g_[add.out[0]].meta;
      if (!joined || b.shape.size() != 1 || b.shape[0] != p.shape.back() || b.strides[0] != 1 ||
          b.dtype != p.dtype || b.device != p.device || sum.shape != p.shape ||
          sum.strides != p.strides || sum.dtype != p.dtype || uses_.output[size_t(product)] ||
          uses_.readers[size_t(product)].size() != 1 ||
          !operands_unchanged(g_, g_.nodes[size_t(at)], at, k))
        continue;
      Node& from = g_.nodes[size_t(at)];
      add.prim = joined;
      add.in = from.in;
      add.in.push_back(bias);
      add.scope = from.scope;
      from.prim = {};
      return;
    }
  }

  Graph& g_;
  Uses uses_;
};

}  // namespace

void join_bias(Graph& graph) {
  if (!graph.deterministic) BiasJoiner(graph).run();
}

}  // namespace tessera::compiler
