// How the launcher tells ranks that one of them has gone. Contract: keys, seen through the store of
// connect_store(),
//   tessera/dead/<rank>  how a failed rank ended: "exit status 3", "signal 9 (Killed)";
//   tessera/failed       number of the first rank that failed (set once, after its dead key), so
//                        one blocking wait learns of a failure without polling;
//   tessera/cause        "1,2": the ranks that the first aborted group's failure comes down to. Set
//                        once, by a rank that has aborted it, while that one runs: those that fail
//                        because of it may end sooner;
//   tessera/left/<rank>  "exit status 0": the rank finished. No failure, but it will not take part
//                        in anything any more; what it had sent may still be under way.
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

/// Announces that `rank` ended; `how` as above.
void announce_death(Store& store, int rank, const std::string& how);
void announce_departure(Store& store, int rank);
/// By a rank: whom the failure of a group comes down to.
void announce_cause(Store& store, std::span<const int> ranks);
/// The ranks that were announced as the cause; empty: none.
std::vector<int> cause_of_failure(Store& store);

/// The failed ranks, the first to fail first; empty while all is well. Does not wait; costs one
/// round trip while nobody has failed.
std::vector<DeadRank> dead_ranks(Store& store, int world_size);

/// The ranks that have finished, by number. Does not wait; one round trip while there is none.
std::vector<DeadRank> left_ranks(Store& store, int world_size);

}  // namespace tessera
