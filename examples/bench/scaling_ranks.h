// The measurement that the ranks of one job of bench scaling make.
#pragma once
#include <nlohmann/json.hpp>

#include "examples/bench/workload.h"

namespace tessera::bench {

struct RankOptions {
  WorkloadOptions workload;  // of one rank; where `strong`, of all ranks together
  Device device = kCPU;      // of this rank
  int steps = 0;             // in each phase; 0: what fills about half a second
  int rounds = 9;
  bool strong = false;  // the ranks share the batch of one
};

/// Runs in every rank of a job. Every round has five phases on the same cores: rank 0 trains while
/// the others wait; all ranks train without communication; the same with a barrier after each step;
/// all train together under ddp; and all train under fsdp. Returns milliseconds per step for each
/// round, "solo_ms", "unconnected_ms", "lockstep_ms", "ddp_ms" and "fsdp_ms" (means over ranks);
/// "unconnected_processor_ms" and "ddp_processor_ms", processor time of all threads of a rank; the
/// cores that the ranks are bound to; and what was trained on what. On a device nobody waits
/// between the steps of a phase, but where there is a barrier. Throws UserError where `strong` and
/// the ranks cannot share the batch evenly.
nlohmann::ordered_json measure_scaling(const RankOptions& options);

}  // namespace tessera::bench
