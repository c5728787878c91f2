// Makes a TCP connection between each two ranks of a group. Both ends prove that they belong to the
// group: the connecting rank sends 32 bytes, the HMAC-SHA256 under the job's key of both ranks and
// of a nonce that the listener wrote to the store, and gets another 32 bytes as an answer. Each
// rank listens on one port for the ranks above it and connects to those below.
#pragma once
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "collectives/gloo/acceptor.h"
#include "collectives/rendezvous_store.h"

namespace tessera::detail {

/// The error that another rank could not be reached.
struct PeerError : std::runtime_error {
  PeerError(int peer, int error) : std::runtime_error(std::strerror(error)), peer(peer) {}
  const int peer;  // in the group
};

/// Returns one nonblocking socket for each rank of the group, in order, and an empty one for this
/// rank. `address` is where this rank listens, `prefix` is the prefix of the store keys that say
/// so. Throws CommError when a member has ended or was not there in time, PeerError, and
/// std::system_error where this host fails.
std::vector<Socket> connect_ranks(const Membership& members, RendezvousStore& store,
                                  const std::string& prefix, const std::string& address,
                                  Millis timeout);

}  // namespace tessera::detail
