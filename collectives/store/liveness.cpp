#include "collectives/store/liveness.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

namespace tessera {
namespace {

constexpr const char* kLeftPrefix = "tessera/left/";

std::vector<DeadRank> ended_ranks(Store& store, int world_size, const char* prefix) {
  std::vector<DeadRank> ended;
  if (store.num_keys(prefix) == 0) return ended;
  for (int rank = 0; rank < world_size; ++rank) {
    const std::string key = prefix + std::to_string(rank);
    if (store.check({&key, 1})) ended.push_back({rank, store.get(key, Millis(0))});
  }
  return ended;
}

}  // namespace

std::string dead_key(int rank) { return kDeadPrefix + std::to_string(rank); }
std::string left_key(int rank) { return kLeftPrefix + std::to_string(rank); }

void announce_death(Store& store, int rank, const std::string& how) {
  store.set(dead_key(rank), how);
  store.compare_set(kFailedKey, "", std::to_string(rank));
}

void announce_departure(Store& store, int rank) { store.set(left_key(rank), "exit status 0"); }

void announce_cause(Store& store, std::span<const int> ranks) {
  store.compare_set(kCauseKey, "", fmt::format("{}", fmt::join(ranks, ",")));
}

std::vector<int> cause_of_failure(Store& store) {
  const std::string key = kCauseKey;
  std::vector<int> ranks;
  if (!store.check({&key, 1})) return ranks;
  const std::string text = store.get(key, Millis(0));
  int rank = 0;
  for (const char *at = text.data(), *end = at + text.size(); at < end; ++at) {
    const auto [next, error] = std::from_chars(at, end, rank);
    if (error != std::errc()) break;
    ranks.push_back(rank), at = next;
  }
  return ranks;
}

std::vector<DeadRank> dead_ranks(Store& store, int world_size) {
  std::vector<DeadRank> dead = ended_ranks(store, world_size, kDeadPrefix);
  std::string failed = kFailedKey;
  if (dead.empty() || !store.check({&failed, 1})) return dead;
  const std::string text = store.get(failed, Millis(0));
  int first = -1;
  std::from_chars(text.data(), text.data() + text.size(), first);
  std::stable_partition(dead.begin(), dead.end(), [&](const auto& d) { return d.rank == first; });
  return dead;
}

std::vector<DeadRank> left_ranks(Store& store, int world_size) {
  return ended_ranks(store, world_size, kLeftPrefix);
}

}  // namespace tessera
