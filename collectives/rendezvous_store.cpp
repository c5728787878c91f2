#include "collectives/rendezvous_store.h"

#include <algorithm>
#include <charconv>
#include <thread>

#include "collectives/store/liveness.h"

namespace tessera::detail {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Millis kWordOfLauncher{300};

// The ranks of a group of `size` that set `keys`, which end in their numbers. Other keys belong to
// no rank.
std::vector<int> ranks_of(std::span<const std::string> keys, int size) {
  std::vector<int> ranks;
  for (const std::string& key : keys) {
    int rank = -1;
    const char* digits = key.data() + key.find_last_not_of("0123456789") + 1;
    std::from_chars(digits, key.data() + key.size(), rank);
    if (rank >= 0 && rank < size) ranks.push_back(rank);
  }
  std::ranges::sort(ranks);
  return ranks;
}

}  // namespace

RendezvousWait::RendezvousWait(const Membership& members, Millis timeout, std::vector<int> absent,
                               Watchdog* dog)
    : members_(members),
      timeout_(timeout),
      absent_(std::move(absent)),
      scope_(dog, *this, Clock::now()) {}

void RendezvousWait::check(std::vector<int> absent) {
  std::lock_guard lock(mutex_);
  absent_ = std::move(absent);
  if (error_) throw *error_;
}

WaitFacts RendezvousWait::facts() const {
  WaitFacts f;
  f.kind = WaitFacts::Kind::kJoin;
  f.group = members_.group;
  f.members = members_.world_ranks;
  f.first = std::max(0, members_.first);
  f.call = "init_process_group";
  f.absent.emplace();
  std::lock_guard lock(mutex_);
  for (int r : absent_) f.absent->push_back(members_.world_ranks[size_t(r)]);
  return f;
}

void RendezvousWait::fail(const CommError& error) {
  std::lock_guard lock(mutex_);
  const std::vector<int>& absent = error.ranks();
  std::vector<int> of_world;
  for (int r : absent)
    of_world.push_back(members_.world_ranks[size_t(r - std::max(0, members_.first))]);
  error_ = CommError(
      fmt::format(
          "init_process_group: {} of {} did not join {} within {:.3g} s{}; look at their "
          "output",
          join_ranks(absent), members_.size, members_.group, double(timeout_.count()) / 1000,
          error.culprits().empty() || error.culprits() == of_world
              ? ""
              : fmt::format(", which comes down to {} of the world", join_ranks(error.culprits()))),
      members_.group, 0, absent, error.culprits());
}

// Calls call(timeout) repeatedly with a timeout of kCheckInterval, and checks the members after
// each failed try.
template <class Call>
auto RendezvousStore::in_turns(std::span<const std::string> keys, Millis timeout, Call call) {
  RendezvousWait wait(members_, timeout, ranks_of(keys, members_.size), dog_.get());
  for (;;) try {
      return call(kCheckInterval);
    } catch (const StoreTimeout& e) {
      check_members();
      wait.check(ranks_of(e.keys(), members_.size));
    }
}

RendezvousStore::RendezvousStore(Membership members, std::shared_ptr<Store> store,
                                 std::string prefix, std::shared_ptr<Watchdog> dog)
    : PrefixStore("", std::move(store)),
      members_(std::move(members)),
      prefix_(std::move(prefix)),
      dog_(std::move(dog)) {}

std::vector<std::string> RendezvousStore::multi_get(std::span<const std::string> keys,
                                                    Millis timeout) {
  return in_turns(keys, timeout, [&](Millis turn) { return PrefixStore::multi_get(keys, turn); });
}

void RendezvousStore::wait(std::span<const std::string> keys, Millis timeout) {
  in_turns(keys, timeout, [&](Millis turn) { PrefixStore::wait(keys, turn); });
}

std::string RendezvousStore::joined_key(int world_rank) const {
  return fmt::format("{}joined/{}", prefix_, world_rank);
}

void RendezvousStore::joined() {
  set(joined_key(members_.world_ranks[size_t(members_.rank)]), "1");
}

void RendezvousStore::check_members() {
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
  const Watchdog::EndReason reason =
      dog_ ? dog_->end_reason_of(first.rank) : Watchdog::EndReason{first.how, {first.rank}};
  throw CommError(
      fmt::format("init_process_group: rank {} ended before all ranks had joined {}: {}; see its "
                  "output, and restart the job",
                  first.rank, members_.group, reason.how.empty() ? first.how : reason.how),
      members_.group, 0, {first.rank}, reason.culprits);
}

void RendezvousStore::explain() {
  for (const auto end = Clock::now() + kWordOfLauncher;;) {
    check_members();
    if (Clock::now() >= end) return;
    std::this_thread::sleep_for(Millis(20));
  }
}

}  // namespace tessera::detail
