#include "collectives/messages/watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "collectives/store/liveness.h"
#include "collectives/thread.h"

namespace tessera::detail {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Millis kLook{100};    // between two looks at what is under way
constexpr int kSuspicions = 2;  // looks in a row before two ranks are held to wait for each other
constexpr Millis kCauseTime{150};

// A status is "C 41 all_reduce train.cpp:88" for a collective, "B 41 ..." where the rank waits for
// its block, "S 2 17 train.cpp:90" for a send to
// rank 2 that holds the rank up ("R" for a receive; 17 is a count that makes it unique), "M" for
// several messages or asynchronous ones.
struct Status {
  char what = '-';
  uint64_t number = 0;  // of a collective; else the peer
  std::string rest;
};
Status parse_status(const std::string& text) {
  Status s;
  if (text.size() < 3) return s;
  s.what = text[0];
  const char* end = text.data() + text.size();
  auto [at, error] = std::from_chars(text.data() + 2, end, s.number);
  if (error == std::errc() && at < end) s.rest.assign(at + 1, end);
  return s;
}
std::string site_in(const Status& s) {
  return s.rest.substr(std::min(s.rest.size(), s.rest.find(' ') + 1));
}

std::string encode(const CommError& e) {
  return fmt::format("{}|{}|{}", e.seq(), fmt::join(e.ranks(), ","), e.what());
}
CommError decode(const std::string& text, const std::string& group) {
  size_t a = text.find('|'), b = text.find('|', a + 1);
  if (b == std::string::npos) return CommError(text, group, 0, {});
  uint64_t seq = 0;
  std::from_chars(text.data(), text.data() + a, seq);
  std::vector<int> ranks;
  for (const char *p = text.data() + a + 1, *end = text.data() + b; p < end;) {
    int r = 0;
    auto [next, error] = std::from_chars(p, end, r);
    if (error != std::errc()) break;
    ranks.push_back(r);
    p = next + 1;
  }
  return CommError(text.substr(b + 1), group, seq, ranks);
}

}  // namespace

Watch::Watch(Membership members, std::shared_ptr<Store> store, std::string prefix)
    : members_(std::move(members)), store_(std::move(store)), prefix_(std::move(prefix)) {
  thread_ = start_thread("tessera-watch", [this] { serve(); });
}

Watch::~Watch() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Watch::Handle Watch::begin(const Call& call, Cancel cancel, std::function<void()> probe,
                           For waits_for) {
  std::lock_guard lock(mutex_);
  if (!call.plan.is_p2p()) entered_ = call.seq();
  if (ops_.empty()) changed_.notify_all();
  Op op;
  op.call = &call;
  op.waits_for = waits_for;
  op.cancel = std::move(cancel), op.probe = std::move(probe);
  op.since = Clock::now();
  op.number = ++count_;
  return ops_.insert(ops_.end(), std::move(op));
}

void Watch::end(Handle op) {
  std::lock_guard lock(mutex_);
  ops_.erase(op);
  if (ops_.empty() && !told_.empty()) changed_.notify_all();
}

void Watch::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !ops_.empty() || !told_.empty(); });
    // Others must not hold what this rank waited for against it any longer.
    if (ops_.empty()) forget_status();
    changed_.wait_for(lock, kLook, [&] { return stop_; });
    if (stop_) return;
    // Only calls that were there a while are worth a look. The lock is held meanwhile, so a call
    // that has just finished waits in end() for a few store round trips, once it was late anyway.
    auto late = [](const Op& op) { return Clock::now() - op.since >= kLook; };
    try {
      for (Op& op : ops_)
        if (late(op)) look(op);
    } catch (const std::exception&) {  // the store is gone; the carrier's own errors still arrive
    }
    for (Op& op : ops_)
      if (op.probe && late(op)) op.probe();
    if (error_)
      for (Op& op : ops_) op.cancel(*error_);
  }
}

void Watch::tell(const std::string& status) {
  if (status == told_) return;
  store_->set(fmt::format("{}status/{}", prefix_, members_.rank), status);
  told_ = status;
}

void Watch::forget_status() {
  try {
    if (!told_.empty()) store_->set(fmt::format("{}status/{}", prefix_, members_.rank), "-");
  } catch (const Error&) {
  }
  told_.clear();
}

std::string Watch::status_of(const Op& op) const {
  const Plan& plan = op.call->plan;
  std::string site = describe(op.call->site);
  if (!plan.is_p2p())
    return fmt::format("{} {} {} {}", op.waits_for == For::kBlock ? 'B' : 'C', op.call->seq(),
                       name_of(plan.record.kind), site);
  if (ops_.size() > 1 || op.call->async) return "M";  // the rank may be about to call what is due
  return fmt::format("{} {} {} {}", plan.takes ? 'R' : 'S', plan.record.peer, op.number, site);
}

std::vector<std::string> Watch::statuses() {
  std::vector<std::string> all(size_t(members_.size));
  for (int r = 0; r < members_.size; ++r) {
    std::string key = fmt::format("{}status/{}", prefix_, r);
    if (store_->check({&key, 1})) all[size_t(r)] = store_->get(key, Millis(0));
  }
  return all;
}

void Watch::look(Op& op) {
  tell(status_of(op));
  std::string key = prefix_ + "obituary";
  if (!error_ && store_->check({&key, 1}))
    error_ = decode(store_->get(key, Millis(0)), members_.group);
  if (error_) return;
  std::vector<std::string> all = statuses();
  const Plan& plan = op.call->plan;
  if (plan.is_p2p()) {
    std::string theirs = all[size_t(plan.record.peer)];
    std::string why = deadlock_with(op, theirs);
    op.suspected = !why.empty() && theirs == op.suspicion ? op.suspected + 1 : 0;
    op.suspicion = theirs;
    if (op.suspected >= kSuspicions)
      error_ = CommError(fmt::format("{} {} rank {}: {}", op.call->title(members_.group),
                                     plan.takes ? "from" : "to", plan.record.peer, why),
                         members_.group, op.call->seq(), {plan.record.peer});
  }
  if (!error_) check_deaths(op);
  if (!error_ && op.waits_for == For::kMessages) check_deadline(op, all);
  if (error_) error_ = decode(store_->compare_set(key, "", encode(*error_)), members_.group);
}

std::string Watch::deadlock_with(const Op& op, const std::string& theirs) const {
  Status s = parse_status(theirs);
  const Plan& plan = op.call->plan;
  int peer = plan.record.peer;
  if (s.what == 'C' && s.number > entered_)
    return fmt::format(
        "ranks made different calls: rank {} waits in {} #{} at {}, which this rank has not "
        "called; they differ in kind; make matching calls",
        peer, s.rest.substr(0, s.rest.find(' ')), s.number, site_in(s));
  if (ops_.size() == 1 && !op.call->async && s.what == (plan.takes ? 'R' : 'S') &&
      int(s.number) == members_.rank)
    return fmt::format(
        "ranks made different calls: rank {} waits in its own {} of this rank at {}; one of the "
        "two must be a {}, or use the _async form",
        peer, plan.takes ? "recv" : "send", site_in(s), plan.takes ? "send" : "recv");
  return "";
}

// A carrier may not notice: bytes for a rank that is gone can wait in a buffer of the system.
void Watch::check_deaths(const Op& op) {
  const int world = std::ranges::max(members_.world_ranks) + 1;
  for (const DeadRank& dead : dead_ranks(*store_, world)) {
    auto at = std::ranges::find(members_.world_ranks, dead.rank);
    const int peer = int(at - members_.world_ranks.begin());
    if (at == members_.world_ranks.end() || peer == members_.rank) continue;
    if (op.call->plan.is_p2p() && peer != op.call->plan.record.peer) continue;
    error_ = gone(*op.call, peer, dead.how);
    return;
  }
}

CommError Watch::gone(const Call& call, int peer, const std::string& how) const {
  const int world = members_.world_ranks[size_t(peer)];
  const std::string who = world == peer ? fmt::format("rank {}", peer)
                                        : fmt::format("rank {} (world rank {})", peer, world);
  return CommError(
      fmt::format("{}: {} is gone, {}; restart the job, or start a new group without it",
                  call.title(members_.group), who, how),
      members_.group, call.seq(), {peer});
}

void Watch::check_deadline(const Op& op, const std::vector<std::string>& all) {
  auto waited = Clock::now() - op.since;
  if (waited < op.call->timeout) return;
  const Plan& plan = op.call->plan;
  std::vector<int> absent, waiting;
  bool held_up = false;  // some rank is, in an earlier call, and will say by whom
  for (int r = 0; r < members_.size; ++r) {
    Status s = parse_status(all[size_t(r)]);
    const bool in_collective = s.what == 'C' || s.what == 'B';
    bool here = plan.is_p2p() ? r != plan.record.peer : in_collective && s.number >= op.call->seq();
    held_up |= !plan.is_p2p() && in_collective && s.number < op.call->seq();
    (here || r == members_.rank ? waiting : absent).push_back(r);
  }
  if (held_up && waited < op.call->timeout + 4 * kGrace) return;
  uint64_t before = plan.is_p2p() ? 0 : op.call->seq() - 1;
  std::string text = fmt::format(
      "{}: {} not seen for {:.3g} s; {}{} {} waiting; look at what holds it up, or raise "
      "TESSERA_TIMEOUT",
      op.call->title(members_.group), join_ranks(absent),
      std::chrono::duration<double>(waited).count(),
      before ? fmt::format("it last finished #{}; ", before) : "", join_ranks(waiting),
      waiting.size() == 1 ? "is" : "are");
  error_ = CommError(text, members_.group, op.call->seq(), absent);
}

std::optional<CommError> Watch::obituary() {
  {
    std::lock_guard lock(mutex_);
    if (error_) return error_;
  }
  try {
    std::string key = prefix_ + "obituary";
    if (store_->check({&key, 1})) return decode(store_->get(key, Millis(0)), members_.group);
  } catch (const Error&) {
  }
  return std::nullopt;
}

CommError Watch::kill(const CommError& error) {
  CommError held = error;
  try {
    held = decode(store_->compare_set(prefix_ + "obituary", "", encode(error)), members_.group);
  } catch (const Error&) {
  }
  std::lock_guard lock(mutex_);
  if (!error_) error_ = held;
  for (Op& op : ops_) op.cancel(*error_);
  return *error_;
}

void Watch::die(const Call& call, const std::string& text, std::vector<int> ranks) {
  throw kill(CommError(text, members_.group, call.seq(), std::move(ranks)));
}

void Watch::explain(const Call& call, int peer, const std::string& what) {
  if (auto known = obituary()) throw *known;
  std::string cause;
  try {
    cause = store_->get(dead_key(members_.world_ranks[size_t(peer)]), kCauseTime);
  } catch (const Error&) {
  }
  if (auto known = obituary()) throw *known;
  // Gloo's text begins with its own source line in brackets.
  std::string reason =
      what.substr(what.rfind("] ") == std::string::npos ? 0 : what.rfind("] ") + 2);
  throw kill(gone(call, peer, cause.empty() ? reason : cause));
}

}  // namespace tessera::detail
