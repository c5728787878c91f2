#include "collectives/nccl/ended.h"

#include <algorithm>

#include "collectives/store/liveness.h"
#include "collectives/watchdog.h"

namespace tessera::nccl {
namespace {

constexpr Millis kAnnounced{500};  // from when a process has ended until its launcher says so

}  // namespace

CommError nccl_failure(const std::string& text, const detail::Membership& members, Store& store,
                       uint64_t seq, const std::string& otherwise, std::vector<int> own) {
  std::string gone;
  std::vector<int> ranks, culprits;
  const StoreTimeLimit limit(detail::Watchdog::kResponseTime);
  try {
    store.get(kFailedKey, kAnnounced);
    for (const DeadRank& d : dead_ranks(store, std::ranges::max(members.world_ranks) + 1))
      if (const auto at = std::ranges::find(members.world_ranks, d.rank);
          at != members.world_ranks.end()) {
        ranks.push_back(int(at - members.world_ranks.begin()));
        culprits.push_back(d.rank);
        gone += fmt::format("; rank {} is gone, {}", ranks.back(), d.how);
      }
  } catch (const tessera::Error&) {  // nothing is announced, or the store is gone
  }
  if (!ranks.empty())
    return CommError(text + gone + "; restart the job, or start a new group without it",
                     members.group, seq, ranks, culprits);
  for (int r : own) culprits.push_back(members.world_ranks[size_t(r)]);
  return CommError(text + otherwise, members.group, seq, own, culprits);
}

}  // namespace tessera::nccl
