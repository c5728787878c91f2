// Messages over MPI, between processes that mpirun started. Deadlines are kept by polling. MPI
// cannot cancel a transfer in progress, and a buffer that it may still write must not be freed. So
// when a wait ends early, by a deadline or because a peer is gone, the process ends with a report
// on its standard error and status 1. (Collectives that do not match are found before any transfer
// and throw CommError as on every backend; a send that does not fit its recv is not found in time.)
#pragma once
#include <memory>
#include <string>

#include "collectives/messages/transport.h"
#include "collectives/rendezvous_store.h"

namespace tessera::detail {

struct MpiOptions {
  std::shared_ptr<RendezvousStore> store;
  std::string prefix;  // of this group's keys
  Millis join_timeout{0};
};

/// Makes the transport; all members must call it. Throws UserError (see Mpi::get) and CommError.
std::unique_ptr<Transport> make_mpi_transport(const Membership& members, const MpiOptions& options);

}  // namespace tessera::detail
