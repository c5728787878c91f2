#include "collectives/messages/watch.h"

#include <fmt/format.h>

namespace tessera::detail {

Watch::Watch(Membership members, std::shared_ptr<Watchdog> dog, std::shared_ptr<Store> store,
             std::string prefix)
    : members_(std::move(members)),
      dog_(std::move(dog)),
      store_(std::move(store)),
      prefix_(std::move(prefix)) {}

Watch::Op::Op(Watch& watch, const Call& call, std::function<void(const CommError&)> end,
              std::function<void()> probe, std::function<int64_t()> moved_bytes, bool in_block)
    : watch_(watch),
      call_(call),
      end_(std::move(end)),
      probe_(std::move(probe)),
      moved_bytes_(std::move(moved_bytes)),
      in_block_(in_block),
      number_([&] {
        std::lock_guard lock(watch.mutex_);
        if (!call.plan.is_p2p()) watch.entered_ = call.seq();
        watch.ops_.push_back(this);
        return ++watch.count_;
      }()) {
  scope_.emplace(watch.dog_.get(), *this, Watchdog::Clock::now());
}

Watch::Op::~Op() {
  scope_.reset();
  std::lock_guard lock(watch_.mutex_);
  watch_.ops_.remove(this);
}

WaitFacts Watch::Op::facts() const {
  using Kind = WaitFacts::Kind;
  const Plan& plan = call_.plan;
  const Membership& m = watch_.members_;
  WaitFacts f;
  f.group = m.group;
  f.members = m.world_ranks, f.hosts = m.hosts;
  f.call = call_.title(), f.site = describe(call_.site);
  f.seq = call_.seq();
  f.holds_up = call_.waited_for();
  if (!plan.is_p2p()) {
    f.number = call_.seq();
    const int peer = awaited_.load(std::memory_order_relaxed);
    if (peer == kNobody) return f;
    f.awaited = m.world_ranks[size_t(peer < 0 ? ~peer : peer)];
    if (peer < 0) f.absent = {f.awaited};
    return f;
  }
  f.number = number_;
  f.peer = m.world_ranks[size_t(plan.record.peer)];
  f.takes = plan.takes;
  std::lock_guard lock(watch_.mutex_);
  f.entered = watch_.entered_;
  // A rank with asynchronous messages may be about to make the call that its peer waits for.
  const bool alone = watch_.ops_.size() == 1 && !call_.async;
  f.kind = !alone ? Kind::kMessages : plan.takes ? Kind::kRecv : Kind::kSend;
  return f;
}

void Watch::Op::fail(const CommError& error) {
  {
    std::lock_guard lock(watch_.mutex_);
    if (!watch_.error_) watch_.error_ = error;
  }
  end_(error);
}

void Watch::Op::probe() {
  if (probe_) probe_();
}

std::optional<CommError> Watch::failure() {
  const StoreTimeLimit limit(Watchdog::kResponseTime);
  try {
    const std::string key = failure_key();
    if (store_->check({&key, 1})) return decode_error(store_->get(key, Millis(0)), members_.group);
  } catch (const Error&) {
  }
  std::lock_guard lock(mutex_);
  return error_;
}

CommError Watch::kill(const CommError& error) {
  const StoreTimeLimit limit(Watchdog::kResponseTime);
  CommError held = error;
  try {
    held = decode_error(store_->compare_set(failure_key(), "", encode(error)), members_.group);
  } catch (const Error&) {
  }
  std::lock_guard lock(mutex_);
  error_ = held;
  for (Op* op : ops_) op->end_(held);
  return held;
}

void Watch::fail_group(const Call& call, const std::string& text, std::vector<int> ranks) {
  throw kill(CommError(text, members_.group, call.seq(), std::move(ranks)));
}

void Watch::explain(const Call& call, int peer, const std::string& what) {
  if (auto ended = [&] {
        std::lock_guard lock(mutex_);
        return error_;
      }())
    throw kill(*ended);
  if (auto known = failure()) throw *known;
  const int world = members_.world_ranks[size_t(peer)];
  const Watchdog::EndReason reason = dog_->end_reason_of(world);
  if (auto known = failure()) throw *known;
  // Gloo's text begins with its own source line in brackets.
  std::string transport_text =
      what.substr(what.rfind("] ") == std::string::npos ? 0 : what.rfind("] ") + 2);
  WaitFacts members;
  members.members = members_.world_ranks, members.hosts = members_.hosts;
  throw kill(CommError(
      fmt::format("{}: {} is gone, {}{}; restart the job, or start a new group without it",
                  call.title(members_.group), members.name_of_rank(world),
                  reason.how.empty() ? transport_text : reason.how, members.neighbours_of(world)),
      members_.group, call.seq(), {peer}, reason.culprits));
}

}  // namespace tessera::detail
