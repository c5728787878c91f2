// Decides which cores each rank runs on. Ranks get equal, neighbouring shares of the cores that
// this process may use; if there are more ranks than cores, they share round-robin. Invariant: no
// rank is bound outside the affinity that tlaunch itself was started with.
#pragma once
#include <string>
#include <vector>

#include "launcher/options.h"

namespace tessera::launcher {

struct Place {
  std::vector<int> cpus;  // logical CPUs to pin to; empty: not pinned
  int cores = 1;          // physical cores to compute on, for OMP_NUM_THREADS
};

struct Placement {
  std::vector<Place> ranks;
  int cores = 1;        // of this process
  bool shared = false;  // ranks share cores
  std::string note;     // what could not be done as asked, for a line of output; "": all was
};

/// The number of physical cores that this process may use, at least 1; cheap.
int usable_cores();

/// With Bind::kGpu rank r gets an equal share of the cores of NUMA node nodes_of_cards[r]; ranks of
/// a node with fewer cores share them. Where a machine of several nodes does not say the node of
/// every card, or a node has no core that may be used, ranks get equal shares of all cores. The
/// note tells of both.
Placement place_ranks(int nproc, Bind bind, const std::vector<int>& nodes_of_cards = {});

/// "0-3,8" for a list of logical CPUs.
std::string cpu_list(const std::vector<int>& cpus);

}  // namespace tessera::launcher
