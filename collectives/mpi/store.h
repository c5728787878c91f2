// Lets ranks that mpirun started find each other: rank 0 serves the store that tlaunch would serve,
// and sends its address to the others by MPI.
#pragma once
#include <memory>

#include "collectives/store/environment.h"

namespace tessera::detail {

/// Returns the job's store. All ranks of the job must make the first call; rank 0 serves the store
/// until its process ends. Throws UserError and CommError.
std::shared_ptr<Store> connect_mpi_store(const JobEnvironment& job, Millis timeout);

}  // namespace tessera::detail
