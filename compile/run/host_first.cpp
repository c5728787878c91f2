#include "compile/run/host_first.h"

#include <algorithm>

#include "compile/run/step_ranges.h"
#include "core/dispatch/copy.h"
#include "core/tensor/device_runtime.h"

namespace tessera::compiler {
namespace {

// A node of the host, or one that brings values of the host to a device.
bool begins_on_host(const Graph& g, const Node& n) {
  const auto host = [&](ValueId id) { return id == kNoValue || g[id].meta.device.is_cpu(); };
  // Large values would live longer, and work on them would no longer run beside the device's.
  constexpr int64_t kSmall = 1024;
  const auto small = [&](ValueId id) { return numel(g[id].meta.shape) <= kSmall; };
  const bool brings = !n.in.empty() && n.into.empty();
  return n.role != Role::kCollective && std::ranges::all_of(n.in, host) &&
         (brings || std::ranges::all_of(n.out, host)) && std::ranges::all_of(n.into, host) &&
         std::ranges::all_of(n.out, small);
}

// A copy of state to a device that captures it where it is (step_ranges.cpp).
bool moves_beside(const Graph& g, const Node& n) {
  static const OpId transfer = transfer_primitive(kCPU)->id();
  if (n.prim->id() != transfer) return false;
  const Device device = g[n.out[0]].meta.device;
  if (!captures_steps(device)) return false;
  const auto state = std::ranges::find(g.implicit, n.in[0], &ImplicitInput::id);
  return state != g.implicit.end() &&
         runtime_of(device).copies_beside(state->tensor.storage()->data());
}

bool has_captured(const Graph& g) {
  return std::ranges::any_of(g.values, [](const auto& v) { return captures_steps(v.meta.device); });
}

}  // namespace

void move_host_first(Graph& g) {
  if (!has_captured(g)) return;
  // Buffers that nodes which stay read or write, so far.
  std::vector<bool> read(g.values.size()), written(g.values.size());
  const auto in = [&](const std::vector<bool>& set) {
    return [&](ValueId id) {
      return id != kNoValue && g[id].buffer != kNoBuffer && set[size_t(g[id].buffer)];
    };
  };
  const auto add = [&](std::vector<bool>& set, const auto& ids) {
    for (ValueId id : ids)
      if (id != kNoValue && g[id].buffer != kNoBuffer) set[size_t(g[id].buffer)] = true;
  };
  std::vector<Node> first, rest;
  for (Node& n : g.nodes) {
    const bool moves =
        begins_on_host(g, n) && !moves_beside(g, n) && std::ranges::none_of(n.in, in(written)) &&
        std::ranges::none_of(n.into, in(written)) && std::ranges::none_of(n.into, in(read));
    if (moves) {
      first.push_back(std::move(n));
      continue;
    }
    add(read, n.in);
    add(written, n.out), add(written, n.into);
    rest.push_back(std::move(n));
  }
  std::ranges::move(rest, std::back_inserter(first));
  g.nodes = std::move(first);
}

}  // namespace tessera::compiler
