#include "collectives/watchdog.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <new>

#include "collectives/engine.h"
#include "collectives/store/liveness.h"
#include "collectives/thread.h"
#include "core/base/log.h"

namespace tessera::detail {
namespace {

using Kind = WaitFacts::Kind;

constexpr int kSuspicions = 2;  // rounds in a row before two ranks count as waiting for each other
constexpr Millis kCauseTime{150};
constexpr size_t kRepeatedBytes = 2000;  // bytes of an error's text that other ranks repeat

std::vector<int> parse_ranks(std::string_view text) {
  std::vector<int> ranks;
  for (const char *p = text.data(), *end = p + text.size(); p < end;) {
    int r = 0;
    auto [next, error] = std::from_chars(p, end, r);
    if (error != std::errc()) break;
    ranks.push_back(r);
    p = next + 1;
  }
  return ranks;
}

std::vector<int> numbers_of(const WaitFacts& facts, std::span<const int> world_ranks) {
  std::vector<int> numbers;
  for (int r : world_ranks)
    if (int n = facts.number_of(r); n >= 0) numbers.push_back(n);
  return numbers;
}

bool intersect(std::span<const int> a, std::span<const int> b) {
  return std::ranges::any_of(a, [&](int r) { return std::ranges::find(b, r) != b.end(); });
}

double in_seconds(Millis time) { return double(time.count()) / 1000; }

// The error of a wait that has lasted `waited`. `progress` says what is known of absent ranks of
// the world.
CommError late_error(const WaitFacts& facts, const Verdict& v, Millis waited,
                     const std::map<int, std::string>& progress) {
  const std::string way_out = ", or raise TESSERA_TIMEOUT", end = v.why.empty() ? "" : "; " + v.why;
  if (v.absent.empty())
    return CommError(
        fmt::format("{}: all ranks are in the call, but not all of its data has come within {:.3g} "
                    "s{}; look at the network{}",
                    facts.title(), in_seconds(waited), end, way_out),
        facts.group, facts.seq, {}, {});
  const bool inside =
      std::ranges::all_of(v.culprits, [&](int r) { return facts.number_of(r) >= 0; });
  const std::vector<int>& blamed = inside ? v.culprits : v.absent;
  std::string text = facts.title() + ":";
  for (int r : blamed) {
    text += fmt::format(" {} not seen for {:.3g} s;", facts.name_of_rank(r), in_seconds(waited));
    if (auto known = progress.find(r); known != progress.end() && !known->second.empty())
      text += fmt::format(" {};", known->second);
    else if (facts.peer < 0 && v.reached > 1)
      text += fmt::format(" it last finished #{};", v.reached - 1);
  }
  if (inside) {
    std::vector<int> others;
    for (int r : facts.members)
      if (std::ranges::find(blamed, r) == blamed.end()) others.push_back(r);
    text += fmt::format(" {} {} waiting{}; look at what holds {} up{}",
                        join_ranks(numbers_of(facts, others)), others.size() == 1 ? "is" : "are",
                        end, blamed.size() == 1 ? "it" : "them", way_out);
  } else {
    text += fmt::format(
        " {}{}; look at what holds {} up{}", v.chain, end,
        v.culprits.size() == 1 ? fmt::format("world rank {}", v.culprits[0]) : "those ranks",
        way_out);
  }
  return CommError(text, facts.group, facts.seq, numbers_of(facts, blamed), v.culprits);
}

}  // namespace

std::string encode(const CommError& e) {
  return fmt::format("{}|{}|{}|{}", e.seq(), fmt::join(e.ranks(), ","),
                     fmt::join(e.culprits(), ","), e.what());
}

CommError decode_error(const std::string& text, const std::string& group) {
  size_t a = text.find('|'), b = text.find('|', a + 1), c = text.find('|', b + 1);
  if (a == std::string::npos || b == std::string::npos || c == std::string::npos)
    return CommError(text, group, 0, {});
  uint64_t seq = 0;
  std::from_chars(text.data(), text.data() + a, seq);
  const std::string_view all = text;
  return CommError(text.substr(c + 1), group, seq, parse_ranks(all.substr(a + 1, b - a - 1)),
                   parse_ranks(all.substr(b + 1, c - b - 1)));
}

// A copy of a wait that has lasted long enough to be checked, made when the round of checks began.
struct Watchdog::Late {
  uint64_t id;
  WaitFacts facts;
  Millis timeout, waited;
  Millis still;  // since the wait began, or bytes moved for it
  Clock::time_point since;
  bool log = false;
  bool follows_failure = false;  // it had begun when this rank failed in some group
  std::string failure_key{};
  std::map<int, std::string> progress;  // by member; filled once the deadline has passed
  std::optional<CommError> error;
};

// Asks ranks what they wait for, anew in each round of checks, and notes which of them still run.
class Watchdog::Inquiry {
 public:
  explicit Inquiry(Watchdog& dog) : dog_(dog) {}
  void next_round() { accounts_.clear(); }
  /// `timeout`: how long a rank that was busy may take until it makes its call.
  Account account_of(int rank, Millis timeout) {
    auto [at, fresh] = accounts_.try_emplace(rank);
    if (fresh) at->second = ask(rank);
    Account a = at->second;
    if (!a.record && Clock::now() - seen_.at(rank).worked < timeout) a.alive.reset();
    return a;
  }

 private:
  // What was seen of a rank since it was first asked about.
  struct Seen {
    Clock::time_point since;       // when it was first asked about, or last published something new
    std::optional<uint64_t> beat;  // none: it has published nothing
    bool runs = false;             // it has published something new
    Clock::time_point worked{};    // when it last made progress with its work
  };
  Account ask(int rank) {
    Account a;
    a.record = dog_.record_of(rank);
    const auto now = Clock::now();
    const auto beat = a.record ? std::optional(a.record->beat) : std::nullopt;
    auto [at, fresh] = seen_.try_emplace(rank, Seen{.since = now, .beat = beat});
    Seen& seen = at->second;
    if (!fresh && seen.beat != beat) seen.since = now, seen.beat = beat, seen.runs = true;
    const auto still = now - seen.since;
    if (!a.record) {
      a.failed_on = dog_.failure_of(rank);
      // Otherwise the rank may be about to publish a wait.
      if (still > 3 * kCheckInterval || !a.failed_on.empty()) a.alive = true;
      return a;
    }
    for (const WorkFacts& w : a.record->work)
      seen.worked = std::max(seen.worked, now - Millis(w.idle_ms));
    if (still >= kResponseTime)
      a.alive = false;
    else if (seen.runs)
      a.alive = true;
    return a;
  }

  Watchdog& dog_;
  std::map<int, Seen> seen_;
  std::map<int, Account> accounts_;  // of this round
};

Watchdog::Scope::Scope(Watchdog* dog, Wait& wait, Clock::time_point since) : dog_(dog) {
  if (dog_) entry_ = dog_->begin(wait, since);
}
Watchdog::Scope::~Scope() {
  if (dog_) dog_->end(entry_);
}

Watchdog::Watchdog(int rank, int world_size, std::shared_ptr<Store> store, std::string prefix,
                   int keeper, Millis silence)
    : rank_(rank),
      size_(world_size),
      keeper_(keeper),
      silence_(silence),
      store_(std::move(store)),
      prefix_(std::move(prefix)),
      birth_(forks()) {}

Watchdog::~Watchdog() {
  if (forks() != birth_) {  // in a forked child: the thread belongs to the parent
    if (thread_.joinable()) thread_.detach();
    new (&changed_) std::condition_variable;  // its destructor would wait for the parent's threads
    return;
  }
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::list<WatchedWait>::iterator Watchdog::begin(Wait& wait, Clock::time_point since) {
  std::lock_guard lock(mutex_);
  if (!thread_.joinable())
    thread_ = start_thread("tessera-watch", [this] { serve(); });
  else if (idle())
    changed_.notify_all();
  return waits_.insert(waits_.end(), {.wait = &wait, .id = ++count_, .since = since});
}

void Watchdog::end(std::list<Entry>::iterator wait) {
  std::lock_guard lock(mutex_);
  waits_.erase(wait);
}

void Watchdog::working(const std::string& group, std::string_view what) {
  std::lock_guard lock(mutex_);
  if (what.empty()) return void(work_.erase(group));
  if (!thread_.joinable())
    thread_ = start_thread("tessera-watch", [this] { serve(); });
  else if (idle())
    changed_.notify_all();
  work_[group] = {std::string(what), Clock::now()};
}

void Watchdog::serve() {
  std::unique_lock lock(mutex_);
  const StoreTimeLimit limit(kResponseTime);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !idle() || published_; });
    changed_.wait_for(lock, kCheckInterval, [&] { return stop_; });
    if (stop_) break;
    std::vector<Late> late = late_waits();
    lock.unlock();
    check_waits(late);
    lock.lock();
    deliver(late);
  }
  lock.unlock();
  delete_record();  // peers must not use the record of a rank that has ended
}

std::vector<Watchdog::Late> Watchdog::late_waits() {
  std::vector<Late> late;
  const auto now = Clock::now();
  for (Entry& e : waits_) {
    if (now - e.since < kCheckInterval) continue;
    const int64_t bytes = e.wait->moved_bytes();
    if (e.moved_bytes >= 0 && bytes > e.moved_bytes) e.moved = now;
    e.moved_bytes = bytes;
    const auto in_millis = [&](Clock::time_point from) {
      return std::chrono::duration_cast<Millis>(now - from);
    };
    late.push_back({.id = e.id,
                    .facts = e.wait->facts(),
                    .timeout = e.wait->timeout(),
                    .waited = in_millis(e.since),
                    .still = in_millis(std::max(e.since, e.moved)),
                    .since = e.since,
                    .log = false,
                    .follows_failure = failure_ && e.since <= failed_at_,
                    .failure_key = e.wait->failure_key(),
                    .progress = {},
                    .error = {}});
    Late& l = late.back();
    if (e.moved > e.since) l.facts.moved_ms_ago = in_millis(e.moved).count();
    const bool again = e.logged == Clock::time_point() || now - e.logged >= Silence::kAgain;
    l.log = l.waited >= silence_ && again && l.facts.holds_up && l.timeout != Millis(0);
    if (l.log) e.logged = now;
    if (l.still >= l.timeout)
      for (int r : l.facts.members) l.progress[r] = e.wait->progress_of(r);
  }
  return late;
}

void Watchdog::check_waits(std::vector<Late>& late) {
  const auto began = Clock::now();
  const bool asks = std::ranges::any_of(late, [](const Late& l) {
    return l.timeout != Millis(0) && (l.still >= l.timeout || l.follows_failure);
  });
  if (!asks) inquiry_.reset();
  if (inquiry_) inquiry_->next_round();
  std::erase_if(suspicions_, [&](const auto& s) {
    return std::ranges::find(late, s.first, &Late::id) == late.end();
  });
  try {
    publish_waits(late);
    const bool waits_for_messages =
        std::ranges::any_of(late, [](const Late& l) { return !l.failure_key.empty(); });
    const std::vector<DeadRank> dead =
        waits_for_messages ? dead_ranks(*store_, size_) : std::vector<DeadRank>();
    for (Late& l : late) {
      heartbeat();
      check_group_failure(l);
      if (!l.error) check_messages(l);
      if (!l.error) check_deaths(l, dead);
      if (!l.error && l.timeout != Millis(0)) check_deadline(l);
      if (!l.error && l.log) {
        Inquiry inquiry(*this);
        log_wait(l, find_culprits(rank_, l.facts, l.timeout, [&](int rank) {
                      return inquiry.account_of(rank, l.timeout);
                    }).absent);
      }
    }
    unanswered_since_.reset();
    return;
  } catch (const std::exception&) {  // most likely the store is gone or does not answer
    if (!unanswered_since_) unanswered_since_ = began;
  }
  for (Late& l : late) {
    if (l.error || l.timeout == Millis(0)) continue;
    if (l.log) log_wait(l, l.facts.absent.value_or(std::vector<int>()));
    if (l.still >= l.timeout && Clock::now() - *unanswered_since_ >= 2 * kResponseTime)
      check_without_store(l);
  }
}

// Judges a wait without the store: this rank knows only which ranks have not made its own call.
void Watchdog::check_without_store(Late& l) {
  Verdict v;
  if (l.facts.absent)
    v.absent = *l.facts.absent;
  else if (const int peer = l.facts.peer >= 0 ? l.facts.peer : l.facts.awaited; peer >= 0)
    v.absent = {peer};
  v.culprits = v.absent;
  v.why = "the store, which knows more, does not answer";
  if (keeper_ >= 0 && keeper_ != rank_) {
    v.culprits = {keeper_};
    if (v.absent.empty() && l.facts.number_of(keeper_) >= 0) v.absent = {keeper_};
    v.why = fmt::format("the store, which world rank {} serves, does not answer", keeper_);
  }
  l.error = late_error(l.facts, v, l.still, l.progress);
}

// Publishes what this rank waits for, and that it runs.
void Watchdog::publish_waits(const std::vector<Late>& late) {
  record_.waits.clear(), record_.work.clear();
  for (const Late& l : late) {
    if (l.timeout == Millis(0)) continue;
    WaitFacts& published = record_.waits.emplace_back(l.facts);
    if (published.absent || published.peer >= 0)
      published.members.clear();  // peers do not need them
  }
  {
    std::lock_guard lock(mutex_);
    for (const auto& [group, work] : work_)
      record_.work.push_back(
          {.group = group,
           .what = work.first,
           .idle_ms = std::chrono::duration_cast<Millis>(Clock::now() - work.second).count()});
  }
  if (record_.waits.empty() && record_.work.empty()) return delete_record();
  published_ = true;
  published_at_ = {};
  heartbeat();
}

// Publishes that this rank runs. It is called during a long round of checks, too.
void Watchdog::heartbeat() {
  if (!published_ || Clock::now() - published_at_ < kCheckInterval) return;
  ++record_.beat;
  store_->set(key("waits", rank_), encode(record_));
  published_at_ = Clock::now();
}

// Deletes the record. If that fails, the next round of checks tries again.
void Watchdog::delete_record() {
  if (!published_) return;
  try {
    store_->delete_key(key("waits", rank_));
    published_ = false;
  } catch (const Error&) {
  }
}

void Watchdog::check_group_failure(Late& l) {
  if (l.failure_key.empty()) return;
  if (auto text = value_of(l.failure_key)) l.error = decode_error(*text, l.facts.group);
}

// Finds a message whose peer and this rank wait for each other forever.
void Watchdog::check_messages(Late& l) {
  const WaitFacts& mine = l.facts;
  if (l.failure_key.empty() || mine.peer < 0) return;
  std::string why, state;
  if (const auto record = record_of(mine.peer))
    for (const WaitFacts& theirs : record->waits) {
      if (theirs.group != mine.group) continue;
      if (theirs.kind == Kind::kCollective && theirs.number > mine.entered)
        why = fmt::format(
            "{} waits in {} at {}, which this rank has not called; they differ in "
            "kind; make matching calls",
            mine.name_of_rank(mine.peer), theirs.call, theirs.site);
      else if (theirs.kind == mine.kind && mine.kind != Kind::kMessages && theirs.peer == rank_)
        why = fmt::format(
            "{} waits in its own {} of this rank at {}; one of the two must be a "
            "{}, or use the _async form",
            mine.name_of_rank(mine.peer), mine.takes ? "recv" : "send", theirs.site,
            mine.takes ? "send" : "recv");
      else
        continue;
      state = fmt::format("{} {}", theirs.title(), theirs.number);
    }
  auto& [before, times] = suspicions_[l.id];
  times = !why.empty() && state == before ? times + 1 : 0;
  before = state;
  if (times >= kSuspicions)
    l.error = CommError(fmt::format("{} {} {}: ranks made different calls: {}", mine.title(),
                                    mine.takes ? "from" : "to", mine.name_of_rank(mine.peer), why),
                        mine.group, mine.seq, numbers_of(mine, {{mine.peer}}), {mine.peer});
}

// Finds waits for dead ranks. A transport may not notice a death: bytes for a rank that has ended
// can stay in a buffer of the system.
void Watchdog::check_deaths(Late& l, const std::vector<DeadRank>& all) {
  if (l.failure_key.empty() || l.timeout == Millis(0)) return;
  for (const DeadRank& dead : all) {
    if (l.facts.number_of(dead.rank) < 0 || dead.rank == rank_) continue;
    if (l.facts.peer >= 0 && dead.rank != l.facts.peer) continue;
    if (l.facts.absent && std::ranges::find(*l.facts.absent, dead.rank) == l.facts.absent->end())
      continue;
    const EndReason reason = end_reason_of(dead.rank);
    l.error =
        CommError(fmt::format("{}: {} is gone, {}{}; restart the job, or start a new group "
                              "without it",
                              l.facts.title(), l.facts.name_of_rank(dead.rank), reason.how,
                              l.facts.neighbours_of(dead.rank)),
                  l.facts.group, l.facts.seq, numbers_of(l.facts, {{dead.rank}}), reason.culprits);
    return;
  }
}

void Watchdog::check_deadline(Late& l) {
  if (l.still < l.timeout && !l.follows_failure) return;
  if (!inquiry_) inquiry_ = std::make_unique<Inquiry>(*this);
  const Verdict verdict = find_culprits(
      rank_, l.facts, l.timeout, [&](int rank) { return inquiry_->account_of(rank, l.timeout); });
  if (l.follows_failure && (l.facts.absent || !verdict.undecided)) check_failure(l, verdict);
  if (l.error || verdict.undecided || l.still < l.timeout) return;
  l.error = late_error(l.facts, verdict, l.still, l.progress);
}

// Ends a wait for ranks that this rank has given up on in another group; the wait began before
// that.
void Watchdog::check_failure(Late& l, const Verdict& verdict) {
  std::lock_guard lock(mutex_);
  if (!intersect(verdict.absent, failure_->culprits()) &&
      !intersect(verdict.culprits, failure_->culprits()))
    return;
  l.error = CommError(fmt::format("{}: given up, as this rank has failed already: {}",
                                  l.facts.title(), failure_->what()),
                      l.facts.group, l.facts.seq, numbers_of(l.facts, verdict.absent),
                      failure_->culprits());
}

void Watchdog::log_wait(const Late& l, const std::vector<int>& absent) {
  logging::warn("{}: has waited {:.3g} s for {}; the deadline is {:.3g} s", l.facts.title(),
                in_seconds(l.waited),
                absent.empty() ? "others, none of whom is known to be absent"
                               : join_ranks(numbers_of(l.facts, absent)),
                in_seconds(l.timeout));
}

// Ends the waits that have an error, and calls probe() on all.
void Watchdog::deliver(std::vector<Late>& late) {
  for (Late& l : late) {
    auto entry = std::ranges::find(waits_, l.id, &Entry::id);
    if (entry == waits_.end()) continue;
    entry->wait->probe();
    if (l.error) entry->wait->fail(*l.error);
  }
}

bool Watchdog::remember_failure(const CommError& error) {
  std::lock_guard lock(mutex_);
  if (failure_) return false;
  failure_ = error;
  failed_at_ = Clock::now();
  return true;
}

std::optional<CommError> Watchdog::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Watchdog::publish_failure(const CommError& error) {
  const StoreTimeLimit limit(kResponseTime);
  try {
    store_->set(key("failed", rank_), encode(error).substr(0, kRepeatedBytes));
  } catch (const Error&) {  // peers then see that this rank is gone, but not why
  }
}

std::vector<int> Watchdog::culprits() const {
  std::lock_guard lock(mutex_);
  return failure_ ? failure_->culprits() : std::vector<int>();
}

Watchdog::EndReason Watchdog::end_reason_of(int rank) {
  const StoreTimeLimit limit(kResponseTime);
  EndReason reason{"", {rank}};
  try {
    auto own = value_of(key("failed", rank));
    reason.how = store_->get(dead_key(rank), own ? Millis(0) : kCauseTime);
  } catch (const Error&) {  // the launcher has not announced it, or there is none
  }
  try {
    if (const auto own = value_of(key("failed", rank))) {
      const CommError error = decode_error(*own, "");
      if (!error.culprits().empty()) reason.culprits = error.culprits();
      reason.how +=
          fmt::format("{}it failed before: {}", reason.how.empty() ? "" : "; ", error.what());
    }
  } catch (const Error&) {
  }
  return reason;
}

std::string Watchdog::key(const char* what, int rank) const {
  return fmt::format("{}{}/{}", prefix_, what, rank);
}

std::optional<std::string> Watchdog::value_of(const std::string& key) const {
  try {
    return store_->get(key, Millis(0));
  } catch (const StoreTimeout&) {  // the key was not set
    return std::nullopt;
  }
}

std::vector<int> Watchdog::failure_of(int rank) const {
  const auto text = value_of(key("failed", rank));
  return text ? decode_error(*text, "").culprits() : std::vector<int>();
}

std::optional<WaitRecord> Watchdog::record_of(int rank) {
  heartbeat();
  const auto text = value_of(key("waits", rank));
  return text ? std::optional(decode_record(*text)) : std::nullopt;
}

}  // namespace tessera::detail
