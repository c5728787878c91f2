#include "compile/ir/cost.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

constexpr double kFlopsPerUs = 100e3, kBytesPerUs = 20e3, kCallUs = 0.5;
constexpr double kLinkBytesPerUs = 4e3, kLatencyUs = 20;

size_t bytes_of(const Graph& g, const ValueIds& list) {
  size_t n = 0;
  for (ValueId id : list) n += compiler::bytes_of(g, id);
  return n;
}

// Every output element is a sum over the weights of its channel.
double convolution_flops(const Graph& g, const Node& n) {
  const bool forward = n.prim->name() == "conv", to_weight = n.prim->name() == "conv_grad_weight";
  const Shape &y = g[forward ? n.out[0] : n.in[0]].meta.shape,
              &w = g[to_weight ? n.out[0] : n.in[1]].meta.shape;
  return 2 * double(numel(y)) * double(numel(w)) / double(std::max<int64_t>(w[0], 1));
}

}  // namespace

size_t bytes_of(const Graph& g, ValueId id) {
  const Meta& m = g[id].meta;
  return size_t(numel(m.shape)) * size_of(m.dtype);
}

double compute_us(const Graph& g, const Node& n) {
  if (n.role == Role::kCollective || (n.role == Role::kView && n.into.empty())) return 0;
  double flops = 0;
  if (n.prim->name().starts_with("conv")) flops = convolution_flops(g, n);
  if (n.prim->name() == "contract") {
    SmallVector<const Meta*, 4> metas;
    for (ValueId id : n.in) metas.push_back(&g[id].meta);
    flops = 2;
    for (const auto& f : n.prim->axes({metas.data(), metas.size()}).factors)
      flops *= double(f.extent);
  }
  double moved = double(bytes_of(g, n.in) + bytes_of(g, n.out));
  return kCallUs + std::max(moved / kBytesPerUs, flops / kFlopsPerUs);
}

double communication_us(const Graph& g, const Node& n) {
  return kLatencyUs + double(std::max(bytes_of(g, n.in), bytes_of(g, n.out))) / kLinkBytesPerUs;
}

}  // namespace tessera::compiler
