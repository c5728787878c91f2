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

constexpr int kSuspicions = 2;  // looks in a row before two ranks are held to wait for each other
constexpr Millis kCauseTime{150};
constexpr size_t kToldBytes = 2000;  // of an error's text that other ranks repeat

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

// The error of a wait that has lasted `waited`, its whole time. `stories` tell what is known of
// absent ranks of the world.
CommError late_error(const WaitFacts& facts, const Verdict& v, Millis waited,
                     const std::map<int, std::string>& stories) {
  std::string text = facts.title() + ":";
  for (int r : v.absent) {
    text += fmt::format(" {} not seen for {:.3g} s;", facts.tell(r), in_seconds(waited));
    if (auto story = stories.find(r); story != stories.end() && !story->second.empty())
      text += fmt::format(" {};", story->second);
  }
  if (v.absent.empty())
    text += fmt::format(
        " all ranks are in the call, but not all of its data has come within {:.3g} s{}{}; look at "
        "the network, or raise TESSERA_TIMEOUT",
        in_seconds(waited), v.story.empty() ? "" : "; ", v.story);
  else if (!v.story.empty())
    text += fmt::format(
        " {}; look at what holds {} up, or raise TESSERA_TIMEOUT", v.story,
        v.culprits.size() == 1 ? fmt::format("world rank {}", v.culprits[0]) : "those ranks");
  else {
    std::vector<int> others;
    for (int r : facts.members)
      if (std::ranges::find(v.absent, r) == v.absent.end()) others.push_back(r);
    text += fmt::format(" {} {} waiting; look at what holds it up, or raise TESSERA_TIMEOUT",
                        join_ranks(numbers_of(facts, others)), others.size() == 1 ? "is" : "are");
  }
  return CommError(text, facts.group, facts.seq, numbers_of(facts, v.absent), v.culprits);
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

// A wait that has lasted long enough for a look, as it was when the look began.
struct Watchdog::Late {
  uint64_t id;
  WaitFacts facts;
  Millis timeout, waited;
  Clock::time_point since;
  bool say, looks_for_deaths;
  std::string obituary_key;
  std::map<int, std::string> stories;  // of members, once the deadline has passed
  std::optional<CommError> error;
};

// Asks ranks what they wait for, again in each look, and sees who of them still lives.
class Watchdog::Inquiry {
 public:
  explicit Inquiry(const Watchdog& dog) : dog_(dog) {}
  void next_look() { accounts_.clear(); }
  Account account_of(int rank) {
    auto [at, fresh] = accounts_.try_emplace(rank);
    if (fresh) at->second = ask(rank);
    return at->second;
  }

 private:
  // What was seen of a rank since it was first asked.
  struct Seen {
    Clock::time_point since;
    std::optional<uint64_t> beat;
  };
  Account ask(int rank) {
    Seen& seen = seen_.try_emplace(rank, Seen{Clock::now(), {}}).first->second;
    const auto asked = Clock::now() - seen.since;
    Account a;
    a.record = dog_.record_of(rank);
    if (!a.record) {  // a wait that has just begun is told of within a look
      if (asked > kLook) a.alive = true;
    } else if (seen.beat && *seen.beat != a.record->beat) {
      a.alive = true;
    } else if (asked >= kPatience) {
      a.alive = false;
    }
    if (a.record && !seen.beat) seen.beat = a.record->beat;
    return a;
  }

  const Watchdog& dog_;
  std::map<int, Seen> seen_;
  std::map<int, Account> accounts_;  // of this look
};

Watchdog::Scope::Scope(Watchdog* dog, Wait& wait, Clock::time_point since) : dog_(dog) {
  if (dog_) entry_ = dog_->begin(wait, since);
}
Watchdog::Scope::~Scope() {
  if (dog_) dog_->end(entry_);
}

Watchdog::Watchdog(int rank, int world_size, std::shared_ptr<Store> store, std::string prefix,
                   int keeper)
    : rank_(rank),
      size_(world_size),
      keeper_(keeper),
      store_(std::move(store)),
      prefix_(std::move(prefix)),
      birth_(forks()) {}

Watchdog::~Watchdog() {
  if (forks() != birth_) {  // a fork's child: the thread is the parent's
    if (thread_.joinable()) thread_.detach();
    new (&changed_) std::condition_variable;  // who sleeps on it is not here
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
  const StorePatience patience(kPatience);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !idle() || told_; });
    changed_.wait_for(lock, kLook, [&] { return stop_; });
    if (stop_) break;
    std::vector<Late> late = late_waits();
    lock.unlock();
    look(late);
    lock.lock();
    deliver(late);
  }
  lock.unlock();
  forget();  // peers must not hold against others what this rank waited for
}

std::vector<Watchdog::Late> Watchdog::late_waits() {
  std::vector<Late> late;
  const auto now = Clock::now();
  for (Entry& e : waits_) {
    if (now - e.since < kLook) continue;
    late.push_back({.id = e.id,
                    .facts = e.wait->facts(),
                    .timeout = e.wait->timeout(),
                    .waited = std::chrono::duration_cast<Millis>(now - e.since),
                    .since = e.since,
                    .say = false,
                    .looks_for_deaths = e.wait->looks_for_deaths(),
                    .obituary_key = e.wait->obituary_key(),
                    .stories = {},
                    .error = {}});
    Late& l = late.back();
    const bool again = e.said == Clock::time_point() || now - e.said >= kRepeat;
    l.say = l.waited >= kSilence && again && l.facts.holds_up && l.timeout != Millis(0);
    if (l.say) e.said = now;
    if (l.waited >= l.timeout)
      for (int r : l.facts.members) l.stories[r] = e.wait->story(r);
  }
  return late;
}

void Watchdog::look(std::vector<Late>& late) {
  bool store_answers = true;
  try {
    tell(late);
  } catch (const Error&) {
    store_answers = false;
  }
  const bool overdue = std::ranges::any_of(
      late, [](const Late& l) { return l.timeout != Millis(0) && l.waited >= l.timeout; });
  if (!overdue) inquiry_.reset();
  if (inquiry_) inquiry_->next_look();
  if (late.empty()) suspicions_.clear();
  for (Late& l : late) try {
      if (store_answers && !l.error) check_obituary(l);
      if (store_answers && !l.error) check_messages(l);
      if (store_answers && !l.error) check_deaths(l);
      if (store_answers && !l.error && l.timeout != Millis(0)) check_deadline(l);
      if (store_answers && l.say && !l.error) say(l);
    } catch (const Error&) {
      store_answers = false;
    }
  if (store_answers) return;
  for (Late& l : late)
    if (!l.error && l.timeout != Millis(0) && l.waited >= l.timeout + kLook) check_alone(l);
}

// Without the store nobody tells what others wait for: who has not come here is all that is known.
void Watchdog::check_alone(Late& l) {
  Verdict v;
  v.story = "the store, which knows more, does not answer";
  if (keeper_ >= 0 && l.facts.number_of(keeper_) >= 0) {
    v.absent = {keeper_};
    v.story = fmt::format("the store, which world rank {} serves, does not answer", keeper_);
  } else if (l.facts.absent) {
    v.absent = *l.facts.absent;
  } else if (const int peer = l.facts.peer >= 0 ? l.facts.peer : l.facts.awaited; peer >= 0) {
    v.absent = {peer};
  }
  v.culprits = v.absent;
  l.error = late_error(l.facts, v, l.waited, l.stories);
}

// Peers learn what this rank waits for, and that it runs.
void Watchdog::tell(const std::vector<Late>& late) {
  WaitRecord record;
  for (const Late& l : late)
    if (l.timeout != Millis(0)) record.waits.push_back(l.facts);
  {
    std::lock_guard lock(mutex_);
    for (const auto& [group, work] : work_)
      record.work.push_back(
          {.group = group,
           .what = work.first,
           .idle_ms = std::chrono::duration_cast<Millis>(Clock::now() - work.second).count()});
  }
  if (record.waits.empty() && record.work.empty()) return forget();
  record.beat = ++beat_;
  told_ = true;
  store_->set(key("waits", rank_), encode(record));
}

void Watchdog::forget() {
  if (!std::exchange(told_, false)) return;
  try {
    store_->delete_key(key("waits", rank_));
  } catch (const Error&) {
  }
}

void Watchdog::check_obituary(Late& l) {
  if (l.obituary_key.empty()) return;
  if (auto text = value_of(l.obituary_key)) l.error = decode_error(*text, l.facts.group);
}

// Whether a message and its peer wait for each other for ever.
void Watchdog::check_messages(Late& l) {
  const WaitFacts& mine = l.facts;
  if (l.obituary_key.empty() || mine.peer < 0) return;
  std::string why, state;
  if (const auto record = record_of(mine.peer))
    for (const WaitFacts& theirs : record->waits) {
      if (theirs.group != mine.group) continue;
      if (theirs.kind == Kind::kCollective && theirs.number > mine.entered)
        why = fmt::format(
            "{} waits in {} at {}, which this rank has not called; they differ in "
            "kind; make matching calls",
            mine.tell(mine.peer), theirs.call, theirs.site);
      else if (theirs.kind == mine.kind && mine.kind != Kind::kMessages && theirs.peer == rank_)
        why = fmt::format(
            "{} waits in its own {} of this rank at {}; one of the two must be a "
            "{}, or use the _async form",
            mine.tell(mine.peer), mine.takes ? "recv" : "send", theirs.site,
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
                                    mine.takes ? "from" : "to", mine.tell(mine.peer), why),
                        mine.group, mine.seq, numbers_of(mine, {{mine.peer}}), {mine.peer});
}

// A carrier may not notice: bytes for a rank that is gone can wait in a buffer of the system.
void Watchdog::check_deaths(Late& l) {
  if (!l.looks_for_deaths) return;
  for (const DeadRank& dead : dead_ranks(*store_, size_)) {
    if (l.facts.number_of(dead.rank) < 0 || dead.rank == rank_) continue;
    if (l.facts.peer >= 0 && dead.rank != l.facts.peer) continue;
    if (l.facts.absent && std::ranges::find(*l.facts.absent, dead.rank) == l.facts.absent->end())
      continue;
    const Fate fate = fate_of(dead.rank);
    l.error =
        CommError(fmt::format("{}: {} is gone, {}; restart the job, or start a new group "
                              "without it",
                              l.facts.title(), l.facts.tell(dead.rank), fate.how),
                  l.facts.group, l.facts.seq, numbers_of(l.facts, {{dead.rank}}), fate.culprits);
    return;
  }
}

void Watchdog::check_deadline(Late& l) {
  bool has_failed;
  {
    std::lock_guard lock(mutex_);
    has_failed = failure_.has_value() && l.since <= failed_at_;
  }
  if (l.waited < l.timeout && !has_failed) return;
  if (!inquiry_) inquiry_ = std::make_unique<Inquiry>(*this);
  const Verdict verdict = find_culprits(rank_, l.facts, l.timeout,
                                        [&](int rank) { return inquiry_->account_of(rank); });
  if (has_failed) check_failure(l, verdict);
  if (l.error || verdict.undecided || l.waited < l.timeout) return;
  l.error = late_error(l.facts, verdict, l.waited, l.stories);
}

// Who was given up in one group is not waited for in the others, where waits have begun already.
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

void Watchdog::say(const Late& l) {
  Inquiry inquiry(*this);
  const Verdict v =
      find_culprits(rank_, l.facts, l.timeout, [&](int rank) { return inquiry.account_of(rank); });
  logging::warn("{}: has waited {:.3g} s for {}; the deadline is {:.3g} s", l.facts.title(),
                in_seconds(l.waited),
                v.absent.empty() ? "data of ranks that are all in the call"
                                 : join_ranks(numbers_of(l.facts, v.absent)),
                in_seconds(l.timeout));
}

// Ends the waits that have an error, and lets the others probe.
void Watchdog::deliver(std::vector<Late>& late) {
  for (Late& l : late) {
    auto entry = std::ranges::find(waits_, l.id, &Entry::id);
    if (entry == waits_.end()) {
      suspicions_.erase(l.id);
      continue;
    }
    entry->wait->probe();
    if (l.error) entry->wait->fail(*l.error);
  }
}

void Watchdog::failed(const CommError& error) {
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = error;
    failed_at_ = Clock::now();
  }
  const StorePatience patience(kPatience);
  try {
    store_->set(key("failed", rank_), encode(error).substr(0, kToldBytes));
  } catch (const Error&) {  // peers see that this rank is gone, if not why
  }
}

std::vector<int> Watchdog::culprits() const {
  std::lock_guard lock(mutex_);
  return failure_ ? failure_->culprits() : std::vector<int>();
}

Watchdog::Fate Watchdog::fate_of(int rank) {
  const StorePatience patience(kPatience);
  Fate fate{"", {rank}};
  try {
    auto own = value_of(key("failed", rank));
    fate.how = store_->get(dead_key(rank), own ? Millis(0) : kCauseTime);
  } catch (const Error&) {  // the launcher has not said it, or there is none
  }
  try {
    if (const auto own = value_of(key("failed", rank))) {
      const CommError error = decode_error(*own, "");
      if (!error.culprits().empty()) fate.culprits = error.culprits();
      fate.how += fmt::format("{}it failed before: {}", fate.how.empty() ? "" : "; ", error.what());
    }
  } catch (const Error&) {
  }
  return fate;
}

std::string Watchdog::key(const char* what, int rank) const {
  return fmt::format("{}{}/{}", prefix_, what, rank);
}

std::optional<std::string> Watchdog::value_of(const std::string& key) const {
  if (!store_->check({&key, 1})) return std::nullopt;
  try {
    return store_->get(key, Millis(0));
  } catch (const StoreTimeout&) {  // deleted meanwhile
    return std::nullopt;
  }
}

std::optional<WaitRecord> Watchdog::record_of(int rank) const {
  const auto text = value_of(key("waits", rank));
  return text ? std::optional(decode_record(*text)) : std::nullopt;
}

}  // namespace tessera::detail
