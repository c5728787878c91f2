// Lets a convolution give the moments of its result's channels to the batch-norm behind it, on
// devices that have such a kernel (conv_stats): these sum what they store, so that a pass over the
// result is saved. Invariant: all that changes are the last digits of the moments.
#include "compile/ir/rewrite.h"
#include "compile/passes/passes.h"
#include "core/dispatch/kernel.h"
#include "core/ops/batch_norm_stats.h"
#include "core/ops/conv_stats.h"
#include "core/primitive/primitive_of.h"

namespace tessera::compiler {
namespace {

class StatsJoiner {
 public:
  explicit StatsJoiner(Graph& g) : g_(g), uses_(g) {}

  void run() {
    for_each(g_, "batch_norm", [&](int32_t k) { join(k); });
    Rewrite(g_).apply();
  }

 private:
  // The moments are made where the convolution is, and batch-norm applies them.
  void join(int32_t k) {
    Node& norm = g_.nodes[size_t(k)];
    const int32_t at = maker(g_, uses_, norm.in[0], "conv");
    if (at == kNoNode) return;
    Node& conv = g_.nodes[size_t(at)];
    const Meta& y = g_[conv.out[0]].meta;
    const PrimRef joined = conv_stats_op(attributes_of<ConvAttributes>(*conv.prim));
    if ((y.dtype != kF16 && y.dtype != kBF16) || !kernel_table().find(y.device.kind, joined->id()))
      return;
    conv.prim = joined;
    conv.out = {ValueId(conv.out[0]), ValueId(norm.out[1]), ValueId(norm.out[2])};
    norm.prim = batch_norm_apply_op(attributes_of<BatchNormAttributes>(*norm.prim));
    ValueIds in{norm.in[0], conv.out[1], conv.out[2]};
    for (size_t i = 1; i < norm.in.size(); ++i) in.push_back(norm.in[i]);
    norm.in = std::move(in);
    norm.out = {ValueId(norm.out[0])};
  }

  Graph& g_;
  Uses uses_;
};

}  // namespace

void join_stats(Graph& graph) {
  if (!graph.deterministic) StatsJoiner(graph).run();
}

}  // namespace tessera::compiler
