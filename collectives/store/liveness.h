// How the launcher tells ranks that one of them has ended. The contract is a set of keys, seen
// through the store of connect_store():
//   tessera/dead/<rank>  how a failed rank ended: "exit status 3", "signal 9 (Killed)";
//   tessera/failed       number of the first rank that failed (set once, after its dead key), so
//                        that one blocking wait learns of a failure without polling;
//   tessera/cause        "1,2": the ranks that caused the failure of the first aborted group. Set
//                        once, by a rank that aborted it, while that rank still runs: ranks that
//                        fail because of it may end sooner;
//   tessera/left/<rank>  "exit status 0": the rank finished. This is no failure, but it will take
//                        part in nothing any more; what it sent may still arrive.
// Invariant: a key is set before survivors are sent any signal.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "collectives/store/store.h"

namespace tessera {

inline constexpr const char* kFailedKey = "tessera/failed";
inline constexpr const char* kCauseKey = "tessera/cause";
inline constexpr const char* kDeadPrefix = "tessera/dead/";

std::string dead_key(int rank);
std::string left_key(int rank);

struct DeadRank {
  int rank;
  std::string how;
};

/// Announces that `rank` ended; `how` is as above.
void announce_death(Store& store, int rank, const std::string& how);
void announce_departure(Store& store, int rank);
/// Called by a rank: announces the ranks that caused the failure of a group.
void announce_cause(Store& store, std::span<const int> ranks);
/// Returns the ranks that were announced as the cause; empty: none.
std::vector<int> cause_of_failure(Store& store);

/// Returns the failed ranks in the order of failure, empty if there are none. Does not wait; costs
/// one round trip if no rank has failed.
std::vector<DeadRank> dead_ranks(Store& store, int world_size);

/// Returns the ranks that have finished, by number. Does not wait; costs one round trip if there
/// are none.
std::vector<DeadRank> left_ranks(Store& store, int world_size);

}  // namespace tessera
