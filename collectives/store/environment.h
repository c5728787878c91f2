// Reads what a launcher tells a worker from the environment. Launchers are looked for in this
// order: tlaunch and torchrun (RANK, WORLD_SIZE, ...), then Open MPI's mpirun
// (OMPI_COMM_WORLD_RANK, ...). Invariant: a value that does not fit, two launchers that contradict
// each other, or several tasks of srun or of another mpirun (SLURM_STEP_NUM_TASKS, PMI_SIZE) give
// one line of error with the variables and their values. Without any of them a process is a job of
// one rank.
#pragma once
#include <memory>
#include <string>

#include "collectives/store/store.h"

namespace tessera {

struct JobEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  int group_rank = 0;  // number of the node
  std::string master_addr = "127.0.0.1";
  int master_port = 0;    // 0: the launcher serves no store
  std::string run_id;     // unique per job; part of every shared name
  std::string key;        // the secret that the store requires
  int restart_count = 0;  // 0 in the first attempt
  bool mpirun = false;    // started by mpirun: ranks find each other by MPI
};

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT,
/// TESSERA_RUN_ID, TESSERA_STORE_KEY and TESSERA_RESTART_COUNT; where there is no WORLD_SIZE,
/// OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE. Throws UserError.
JobEnvironment job_environment();

/// Connects to the job's store, seen through a prefix of this attempt, so that a process left over
/// from an earlier attempt does no harm. It is a MemoryStore when no launcher serves one and
/// world_size is 1, otherwise a TcpStore. Checks whether as many files can be opened as the ranks
/// need together. Waits at most `timeout` for the server. Throws UserError and CommError.
std::shared_ptr<Store> connect_store(const JobEnvironment& job,
                                     Millis timeout = std::chrono::seconds(600));

/// The prefix of attempt `restart_count`; the launcher's announcements have the same one.
std::string attempt_prefix(int restart_count);

}  // namespace tessera
