// Connects the ranks of a group through Gloo, using our store for the rendezvous.
#pragma once
#include <gloo/rendezvous/context.h>

#include <memory>
#include <vector>

#include "collectives/gloo/transport.h"

namespace tessera::detail {

struct GlooConnections {
  std::shared_ptr<gloo::rendezvous::Context> context;
  std::vector<int> sockets;  // of the context, by rank; -1: this rank itself
};
/// Connects all pairs of ranks. Throws CommError.
GlooConnections connect_gloo(const Membership& members, const GlooOptions& options);

}  // namespace tessera::detail
