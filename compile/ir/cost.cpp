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

}  // namespace

size_t bytes_of(const Graph& g, ValueId id) {
  const Meta& m = g[id].meta;
  return size_t(numel(m.shape)) * size_of(m.dtype);
}

double compute_us(const Graph& g, const Node& n) {
  if (n.role == Role::kCollective || (n.role == Role::kView && n.into.empty())) return 0;
  SmallVector<const Meta*, 4> in;
  Metas out;
  for (ValueId id : n.in) in.push_back(&g[id].meta);
  for (ValueId id : n.out) out.push_back(g[id].meta);
  const double flops = n.prim->flops({in.data(), in.size()}, {out.data(), out.size()});
  double moved = double(bytes_of(g, n.in) + bytes_of(g, n.out));
  return kCallUs + std::max(moved / kBytesPerUs, flops / kFlopsPerUs);
}

double communication_us(const Graph& g, const Node& n) {
  return kLatencyUs + double(std::max(bytes_of(g, n.in), bytes_of(g, n.out))) / kLinkBytesPerUs;
}

}  // namespace tessera::compiler
