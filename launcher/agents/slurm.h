// What Slurm tells a task of the step it is part of. A process is a task of a step only where all
// of it fits together: a batch script without srun has SLURM_PROCID and SLURM_NNODES too.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace tessera::launcher {

struct SlurmStep {
  int nodes = 1, node = 0;  // hosts of the step, and the number of this one
  int tasks = 1;
  std::vector<std::string> hosts;  // in the order of their numbers
  std::string id;                  // "1234.0": job and step
};

/// The step of this process; nullopt: it is the task of no step. Throws UserError where the
/// variables contradict each other.
std::optional<SlurmStep> slurm_step();

/// "node[0-1,3],login" -> node0, node1, node3, login. Throws UserError for what is no such list.
std::vector<std::string> slurm_hosts(const std::string& list);

/// The port at which the agents of a step meet: the same on all hosts, and for two steps most
/// likely not the same.
int slurm_port(const SlurmStep& step);

}  // namespace tessera::launcher
