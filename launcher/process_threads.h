// Settings of OpenMP for a program that tlaunch has not started. They must be in the environment
// before the program begins, because libgomp reads them while it is loaded.
#pragma once

namespace tessera {

/// How often libgomp's threads poll before they sleep (GOMP_SPINCOUNT): longer than most gaps
/// between the loops of a step. The default is a hundred times that; where other programs run too,
/// a waiting thread would then keep the core from the thread that it waits for.
inline constexpr const char* kSpins = "3000";

/// To be called first in main. Sets what tlaunch would have set, and executes this process again:
/// GOMP_SPINCOUNT, where the environment says nothing about waiting threads (OMP_WAIT_POLICY,
/// GOMP_SPINCOUNT); and if another launcher runs several ranks on this host (LOCAL_WORLD_SIZE,
/// OMPI_COMM_WORLD_LOCAL_SIZE) and has not bound them to cores, this rank's share of the cores as
/// OMP_NUM_THREADS, unless that is set. Returns where there is nothing to set.
void settle_threads(char** argv);

}  // namespace tessera
