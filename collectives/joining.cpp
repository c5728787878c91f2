#include "collectives/joining.h"

#include <algorithm>
#include <thread>

#include "collectives/store/liveness.h"

namespace tessera::detail {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Millis kWordOfLauncher{300};

// call(timeout) in turns of kLook, with a look at the members after each that was in vain.
template <class Call>
auto in_turns(const char* name, JoiningStore& store, size_t keys, Millis timeout, Call call) {
  const auto deadline = deadline_after(timeout);
  for (;;) {
    const auto left = std::chrono::duration_cast<Millis>(deadline - Clock::now());
    try {
      return call(std::clamp(left, Millis(0), JoiningStore::kLook));
    } catch (const StoreTimeout& e) {
      store.check_members();
      if (left <= JoiningStore::kLook) throw StoreTimeout(name, e.keys(), keys, timeout);
    }
  }
}

}  // namespace

JoiningStore::JoiningStore(Membership members, std::shared_ptr<Store> store, std::string prefix)
    : PrefixStore("", std::move(store)), members_(std::move(members)), prefix_(std::move(prefix)) {}

std::vector<std::string> JoiningStore::multi_get(std::span<const std::string> keys,
                                                 Millis timeout) {
  return in_turns("get", *this, keys.size(), timeout,
                  [&](Millis turn) { return PrefixStore::multi_get(keys, turn); });
}

void JoiningStore::wait(std::span<const std::string> keys, Millis timeout) {
  in_turns("wait", *this, keys.size(), timeout,
           [&](Millis turn) { PrefixStore::wait(keys, turn); });
}

std::string JoiningStore::joined_key(int world_rank) const {
  return fmt::format("{}joined/{}", prefix_, world_rank);
}

void JoiningStore::joined() { set(joined_key(members_.world_ranks[size_t(members_.rank)]), "1"); }

void JoiningStore::check_members() {
  const int world = std::ranges::max(members_.world_ranks) + 1;
  std::vector<DeadRank> ended = dead_ranks(*this, world);
  for (DeadRank& left : left_ranks(*this, world)) {
    const std::string joined = joined_key(left.rank);
    if (!PrefixStore::check({&joined, 1})) ended.push_back(std::move(left));
  }
  std::erase_if(ended, [&](const DeadRank& d) {
    return std::ranges::find(members_.world_ranks, d.rank) == members_.world_ranks.end();
  });
  if (ended.empty()) return;
  const DeadRank& first = ended[0];
  throw CommError(
      fmt::format("init_process_group: rank {} ended before all ranks had joined {}: {}; see its "
                  "output, and restart the job",
                  first.rank, members_.group, first.how),
      members_.group, 0, {first.rank});
}

void JoiningStore::explain() {
  for (const auto end = Clock::now() + kWordOfLauncher;;) {
    check_members();
    if (Clock::now() >= end) return;
    std::this_thread::sleep_for(Millis(20));
  }
}

}  // namespace tessera::detail
