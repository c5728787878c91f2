#include "collectives/store/liveness.h"

#include <algorithm>

namespace tessera {

std::string dead_key(int rank) { return kDeadPrefix + std::to_string(rank); }
std::string left_key(int rank) { return "tessera/left/" + std::to_string(rank); }

void announce_death(Store& store, int rank, const std::string& how) {
  store.set(dead_key(rank), how);
  store.compare_set(kFailedKey, "", std::to_string(rank));
}

void announce_departure(Store& store, int rank) { store.set(left_key(rank), "exit status 0"); }

std::vector<DeadRank> dead_ranks(Store& store, int world_size) {
  std::vector<DeadRank> dead;
  if (store.num_keys(kDeadPrefix) == 0) return dead;
  for (int rank = 0; rank < world_size; ++rank) {
    std::string key = dead_key(rank);
    if (store.check({&key, 1})) dead.push_back({rank, store.get(key, Millis(0))});
  }
  std::string failed = kFailedKey;
  if (!store.check({&failed, 1})) return dead;
  int first = std::stoi(store.get(failed, Millis(0)));
  std::stable_partition(dead.begin(), dead.end(), [&](const auto& d) { return d.rank == first; });
  return dead;
}

}  // namespace tessera
