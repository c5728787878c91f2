// Connects the ranks of a group through Gloo, using our store for the rendezvous.
#pragma once
#include <gloo/rendezvous/context.h>

#include <memory>

#include "collectives/gloo/transport.h"

namespace tessera::detail {

/// Connects all pairs of ranks. Listens on 127.0.0.1 when all ranks are on this host, otherwise on
/// the address from which this host reaches MASTER_ADDR. Throws CommError.
std::shared_ptr<gloo::rendezvous::Context> connect_gloo(const Membership& members,
                                                        const GlooOptions& options);

}  // namespace tessera::detail
