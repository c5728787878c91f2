// A TCP connection between each two ranks of a group, both of whose ends have shown that they
// belong to it: who connects sends 32 bytes, HMAC-SHA256 under the job's key of a nonce that the
// listener left in the store and of both ranks, and is answered by another 32. Each rank listens on
// one port, for the ranks above it, and connects to those below.
#pragma once
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "collectives/gloo/acceptor.h"
#include "collectives/rendezvous_store.h"

namespace tessera::detail {

/// Another rank could not be reached.
struct PeerError : std::runtime_error {
  PeerError(int peer, int error) : std::runtime_error(std::strerror(error)), peer(peer) {}
  const int peer;  // in the group
};

/// A socket for each rank of the group, in their order, but none for this rank; they do not block.
/// `address` is where this rank listens, `prefix` that of the keys which say so. Throws CommError
/// when a member has ended or did not come in time, PeerError, and std::system_error where this
/// host fails.
std::vector<Socket> connect_ranks(const Membership& members, RendezvousStore& store,
                                  const std::string& prefix, const std::string& address,
                                  Millis timeout);

}  // namespace tessera::detail
