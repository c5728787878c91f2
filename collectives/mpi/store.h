// How ranks that mpirun started find each other: rank 0 serves the store that tlaunch would serve,
// and tells the others by MPI where it is.
#pragma once
#include <memory>

#include "collectives/store/environment.h"

namespace tessera::detail {

/// The job's store. The first call is a collective one of all ranks of the job; rank 0 serves until
/// it ends. Throws UserError, CommError.
std::shared_ptr<Store> connect_mpi_store(const JobEnvironment& job, Millis timeout);

}  // namespace tessera::detail
