// The TCP backend: Gloo (Debian's 2022 release) as a carrier of messages between ranks, our plans
// and our reduction order on top. Gloo's own verbs are not used: they lack reduce_scatter and
// uneven forms, add up in an order that depends on sizes, and abort the process when counts differ.
// Invariant: no message of a collective is sent before all ranks' call records have been compared.
#pragma once
#include <memory>
#include <string>

#include "collectives/engine.h"
#include "collectives/store/store.h"

namespace tessera::detail {

struct GlooOptions {
  std::shared_ptr<Store> store;
  std::string prefix;     // of this group's keys
  bool loopback = false;  // all ranks are on this host: listen on 127.0.0.1 only
  Millis timeout{0};
  Millis join_timeout{0};
};

/// Connects all pairs of ranks. Throws CommError.
std::unique_ptr<Engine> make_gloo_engine(const Membership& members, const GlooOptions& options);

}  // namespace tessera::detail
