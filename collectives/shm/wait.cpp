// Waiting for peers. A wait polls for a moment, then sleeps until a peer rings the rank's bell; or
// it dozes until its own program submits another call or is blocked, or a peer's program is. Every
// 20 ms, or 100 ms when it dozes, it checks whether the absent ranks still live and whether the
// group has been killed. Once it has lasted 100 ms it is reported to the rank's watchdog, which
// keeps the deadline. Invariant: the first rank that finds the group dead writes the failure, and
// every rank throws that text.
#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <ranges>

#include "collectives/shm/cpu.h"
#include "collectives/shm/engine.h"
#include "collectives/shm/process.h"

namespace tessera::detail {
namespace {

constexpr auto kCheckInterval =
    std::chrono::milliseconds(20);  // between two checks of absent ranks
// How long peers may take to write their call sites after a mismatch.
constexpr auto kSiteTime = std::chrono::milliseconds(500);
constexpr int kFewPolls = 16;  // before sleeping peers are woken
// Waking a rank costs its peer 10 to 20 us, and 20 to 70 us pass until it runs (futex, measured in
// a virtual machine). So a blocked thread, which has the core to itself, polls longer. A
// communication thread whose rank computes meanwhile leaves the core to it, unless peers are at
// work on the same call, which does not take long.
constexpr int kPollsBesideWork = 40, kPollsAtWork = 1000;
// How long a blocked thread polls beyond that: about as long as ranks are apart at the end of a
// step. Where other programs share the cores, a thread that has computed until now would be
// preempted just when its peers arrive, so it goes to sleep soon; a communication thread has slept
// before.
constexpr auto kKeepPolling = std::chrono::microseconds(100), kKeepPollingAsync = 10 * kKeepPolling;

void futex_wait(std::atomic<uint32_t>& word, uint32_t value, std::chrono::nanoseconds timeout) {
  const auto whole = std::chrono::floor<std::chrono::seconds>(timeout);
  timespec t{time_t(whole.count()), long((timeout - whole).count())};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &t, nullptr, 0);
}
void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

void ShmEngine::ring(int r) {
  std::atomic<uint32_t>& bell = segment_->state(r).bell;
  bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(bell);
}

void ShmEngine::ring_all() {
  for (int r = 0; r < size_; ++r) ring(r);
}

/// Wakes the peers that sleep and have not seen what was posted, and those that doze if
/// `wakes_dozing_`.
void ShmEngine::wake_peers() {
  store_before_load();
  for (int r = 0; r < size_; ++r) {
    const Sleep sleep = segment_->state(r).sleep.load(std::memory_order_relaxed);
    if (sleep == Sleep::kDeep || (sleep == Sleep::kDoze && wakes_dozing_)) ring(r);
  }
}

bool ShmEngine::park(FunctionRef<bool()> ready, const Call* call) {
  const bool dozes = call && may_doze(*call);
  // A wake-up cannot be lost, because of the order of these two stores and loads against the peer's
  // post and its check for sleepers (wake_peers); all of them are sequentially consistent.
  awaited_.store(phase_, std::memory_order_relaxed);
  me_.sleep.store(dozes ? Sleep::kDoze : Sleep::kDeep, std::memory_order_seq_cst);
  uint32_t bell = me_.bell.load(std::memory_order_seq_cst);
  bool now = ready();
  // A thread that becomes blocked counts itself before it rings.
  const bool held_up = dozes && !may_doze(*call);
  if (!now && !held_up && segment_->failure().state.load(std::memory_order_seq_cst) != 2) {
    futex_wait(me_.bell, bell, dozes ? options_.doze : kCheckInterval);
    now = ready();
  }
  me_.sleep.store(Sleep::kNone, std::memory_order_seq_cst);
  return now;
}

bool ShmEngine::all_posted(uint64_t phase) const {
  for (int r = 0; r < size_; ++r)
    if (segment_->state(r).posted.load(std::memory_order_seq_cst) < phase) return false;
  return true;
}

void ShmEngine::call_queued() {
  if (me_.sleep.load(std::memory_order_seq_cst) == Sleep::kDoze &&
      all_posted(awaited_.load(std::memory_order_relaxed)))
    ring(rank_);
}

/// Whether a communication thread sleeps until its own program needs the call. If it has no CPU
/// beside its program's, being woken at once gains nothing, and costs both ranks more than reducing
/// a bucket: 40 to 120 us of interrupts (in a virtual machine).
bool ShmEngine::may_doze(const Call& call) const {
  return leaves_to_waiters(call) && !call.waited_for() && !trial_;
}

bool ShmEngine::leaves_to_waiters(const Call& call) const {
  const int cpus = cpus_a_rank();
  return (cpus == 0 || cpus == 1) && call.timeout >= 10 * options_.doze;
}

/// The number of CPUs that the ranks may use together, divided by the number of ranks: 1 for two
/// ranks that are bound to a core each; 0 for three ranks that share two cores, bound or not, and
/// would take the cores from each other by polling. -1 until all have attached.
int ShmEngine::cpus_a_rank() const {
  int known = cpus_a_rank_.load(std::memory_order_relaxed);
  if (known >= 0) return known;
  if (segment_->attached().load(std::memory_order_acquire) < uint32_t(size_)) return -1;
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int r = 0; r < size_; ++r) CPU_OR(&all, &all, &segment_->state(r).cpus);
  known = CPU_COUNT(&all) / size_;
  cpus_a_rank_.store(known, std::memory_order_relaxed);
  return known;
}

int ShmEngine::spins() const { return has_room() ? 400 : 4; }

int ShmEngine::polls(const Call& call, Peers peers) const {
  auto dozes = [&](int r) {
    return segment_->state(r).sleep.load(std::memory_order_relaxed) == Sleep::kDoze;
  };
  if (peers == Peers::kAtWork && has_room() &&
      std::ranges::none_of(std::views::iota(0, size_), dozes))
    return kPollsAtWork;
  return call.waited_for() ? spins() : std::min(spins(), kPollsBesideWork);
}

/// On a blocked thread, polls until `*until`, which is set by the first call for a wait that finds
/// its thread blocked. Returns true when ready.
bool ShmEngine::keep_polling(const Call& call, FunctionRef<bool()> ready,
                             Clock::time_point* until) {
  if (!has_room() || !call.waited_for()) return false;
  auto now = Clock::now();
  if (*until == Clock::time_point()) *until = now + (call.async ? kKeepPollingAsync : kKeepPolling);
  for (; now < *until; now = Clock::now()) {
    for (int i = 0; i < kFewPolls; ++i) {
      if (ready()) return true;
      relax();
    }
  }
  return false;
}

void ShmEngine::wait_slow(Call& call, Peers peers) {
  auto ready = [&] { return all_posted(phase_); };
  // Sleeping peers are woken only after a few polls: the check for them stalls this rank until its
  // store is visible to all, and if no peer sleeps they arrive meanwhile. A peer that falls asleep
  // later has seen what was posted.
  const int spins = polls(call, peers), few = std::min(spins, kFewPolls);
  for (int i = 0; i < spins; ++i) {
    if (ready()) return i < few ? wake_peers() : void();
    if (i == few - 1) wake_peers();
    relax();
  }
  const auto since = Clock::now();
  auto looked = since;
  Clock::time_point until;
  std::optional<CollectiveWait> wait;
  std::optional<Watchdog::Scope> watched;
  for (;;) {
    if (keep_polling(call, ready, &until)) return;
    // A dozing peer mostly arrives by itself meanwhile: a blocked rank is only a moment ahead of
    // it, and interrupting the peer would set it back further. So dozing peers are woken only now.
    if (!wakes_dozing_ && !may_doze(call)) wakes_dozing_ = true, wake_peers();
    publish_site(call);
    if (park(ready, &call)) return;
    throw_if_failed();
    auto now = Clock::now();
    if (now - looked < kCheckInterval / 2) continue;
    looked = now;
    check_deaths(call);
    if (watched || now - since < Watchdog::kCheckInterval) continue;
    wait.emplace(*this, call);
    watched.emplace(options_.watchdog.get(), *wait, since);
  }
}

/// Writes the call site to where peers can read it.
void ShmEngine::publish_site(const Call& call) {
  if (call.plan.is_p2p() || me_.site_seq.load(std::memory_order_relaxed) == call.seq()) return;
  me_.site.write(describe(call.site));
  me_.site_seq.store(call.seq(), std::memory_order_seq_cst);
}

void ShmEngine::throw_if_failed() {
  FailureRecord& o = segment_->failure();
  if (o.state.load(std::memory_order_acquire) != 2) return;
  throw CommError(o.text, members_.group, o.seq, o.ranks.read(), o.culprits.read());
}

void ShmEngine::abort(const CommError& error) {
  FailureRecord& o = segment_->failure();
  uint32_t none = 0;
  if (o.state.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
    std::string_view text = error.what();
    std::memcpy(o.text, text.data(), std::min(text.size(), sizeof o.text - 1));
    o.seq = error.seq();
    o.ranks.write(error.ranks());
    o.culprits.write(error.culprits());
    o.state.store(2, std::memory_order_seq_cst);
  }
  ring_all();
}

void ShmEngine::fail_group(const Call& call, const std::string& text, std::vector<int> ranks,
                           std::vector<int> culprits) {
  CommError error(text, members_.group, call.seq(), std::move(ranks), std::move(culprits));
  abort(error);
  for (int i = 0; i < 1000; ++i) {  // another rank may be writing the failure at this moment
    throw_if_failed();
    usleep(1000);
  }
  throw error;
}

std::string ShmEngine::name_of_rank(int r) const {
  const int mine = members_.number(r), global = members_.world_ranks[size_t(r)];
  return global == mine ? fmt::format("rank {}", mine)
                        : fmt::format("rank {} (world rank {})", mine, global);
}

std::string ShmEngine::progress_of(int r) const {
  if (members_.first >= 0) return "it has begun the call";
  uint64_t done = segment_->state(r).finished.load(std::memory_order_acquire);
  return done ? fmt::format("it last finished #{}", done) : "it has finished no collective";
}

bool ShmEngine::is_gone(int r, Watchdog::EndReason* reason) const {
  const RankState& s = segment_->state(r);
  const bool ended = options_.processes && s.pid && process_ended(s.pid, s.started);
  if (!ended && !s.left.load(std::memory_order_seq_cst)) return false;
  const int world = members_.world_ranks[size_t(r)];
  *reason = options_.watchdog ? options_.watchdog->end_reason_of(world)
                              : Watchdog::EndReason{"", {world}};
  const std::string how = ended ? fmt::format("process {} has ended", s.pid)
                                : "it has left the group (its ProcessGroup was destroyed)";
  reason->how = reason->how.empty() ? how : fmt::format("{}: {}", how, reason->how);
  return true;
}

/// The ranks of the group that have not posted this phase.
std::vector<int> ShmEngine::absent_ranks(uint64_t phase) const {
  std::vector<int> absent;
  for (int r = 0; r < size_; ++r)
    if (segment_->state(r).posted.load(std::memory_order_seq_cst) < phase) absent.push_back(r);
  return absent;
}

void ShmEngine::check_deaths(const Call& call) {
  std::string text;
  std::vector<int> gone, culprits;
  for (int r : absent_ranks(phase_)) {
    Watchdog::EndReason reason;
    if (!is_gone(r, &reason)) continue;
    // The rank may have done its part before it ended.
    if (segment_->state(r).posted.load(std::memory_order_seq_cst) >= phase_) continue;
    text += fmt::format(" {} is gone, {}; {};", name_of_rank(r), reason.how, progress_of(r));
    gone.push_back(members_.number(r));
    for (int c : reason.culprits)
      if (std::ranges::find(culprits, c) == culprits.end()) culprits.push_back(c);
  }
  if (gone.empty()) return;
  fail_group(call,
             fmt::format("{}:{} restart the job, or start a new group without it",
                         call.title(members_.group), text),
             gone, culprits);
}

WaitFacts ShmEngine::facts_of(const Call& call) const {
  WaitFacts f;
  f.group = members_.group;
  f.members = members_.world_ranks;
  f.first = std::max(0, members_.first);
  f.number = f.seq = call.seq();
  f.call = call.title(), f.site = describe(call.site);
  f.holds_up = call.waited_for();
  return f;
}

WaitFacts ShmEngine::CollectiveWait::facts() const {
  WaitFacts f = engine_.facts_of(call_);
  f.absent.emplace();
  for (int r : engine_.absent_ranks(phase_))
    f.absent->push_back(engine_.members_.world_ranks[size_t(r)]);
  return f;
}

std::string ShmEngine::CollectiveWait::progress_of(int world_rank) const {
  const auto at = std::ranges::find(engine_.members_.world_ranks, world_rank);
  return engine_.progress_of(int(at - engine_.members_.world_ranks.begin()));
}

void ShmEngine::check_orders(const Call& call) {
  std::vector<OrderDigest> digests(static_cast<size_t>(size_));
  for (int r = 0; r < size_; ++r) {
    const RankState& s = segment_->state(r);
    if (s.records[turn_ & 1].order) digests[size_t(r)] = s.digests[turn_ & 1];
  }
  std::vector<int> blame;
  std::string text = compare_orders(digests, *call.order, rank_, call.title(members_.group), blame);
  if (!text.empty()) fail_group(call, text, blame);
}

void ShmEngine::report_mismatch(Call& call) {
  uint64_t seq = call.seq();
  publish_site(call);
  ring_all();
  auto since = Clock::now();
  auto all_published = [&] {
    for (int r = 0; r < size_; ++r)
      if (segment_->state(r).site_seq.load(std::memory_order_seq_cst) < seq) return false;
    return true;
  };
  while (!all_published() && Clock::now() - since < kSiteTime)
    if (!park(all_published)) throw_if_failed();
  std::vector<CallRecord> records;
  std::vector<std::string> sites;
  for (int r = 0; r < size_; ++r) {
    const RankState& s = segment_->state(r);
    records.push_back(s.records[turn_ & 1]);
    bool known = s.site_seq.load(std::memory_order_seq_cst) == seq;
    sites.push_back(known ? s.site.read() : "an unknown place");
  }
  std::vector<int> blame;
  std::string text = compare_calls(records, sites, members_.group, blame);
  fail_group(call, text, blame);
}

}  // namespace tessera::detail
