// The order of nodes of the host among nodes of a device.
// Internal: not part of the public interface.
#pragma once
#include "compile/ir/graph.h"

namespace tessera::compiler {

/// Where steps of `graph` are captured (captures_steps), moves the nodes of the host with small
/// results that need no result of a device, such as draws of random keys, in front of all others,
/// and with them those that bring such values to a device: what lies between two of them is
/// captured as one.
void move_host_first(Graph& graph);

}  // namespace tessera::compiler
