// Moves messages over TCP with Gloo (Debian's release of 2022). Gloo's own collectives are not
// used: they abort the process when counts differ.
#pragma once
#include <memory>
#include <string>

#include "collectives/messages/transport.h"
#include "collectives/rendezvous_store.h"

namespace tessera::detail {

struct GlooOptions {
  std::shared_ptr<RendezvousStore> store;
  std::string prefix;   // of this group's keys
  std::string address;  // numeric, where this rank listens
  Millis timeout{0};
  Millis join_timeout{0};
};

/// Connects all pairs of ranks. Throws CommError.
std::unique_ptr<Transport> make_gloo_transport(const Membership& members,
                                               const GlooOptions& options);

}  // namespace tessera::detail
