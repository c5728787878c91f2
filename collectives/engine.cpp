#include "collectives/engine.h"

#include <algorithm>
#include <cstring>

#include "collectives/reduction.h"

namespace tessera::detail {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

/// Keeps the server from being destroyed while this object lives, unless it is gone already.
class Waiters::Visit {
 public:
  explicit Visit(Waiters& w) : w_(w) {
    std::lock_guard lock(w_.mutex_);
    server = w_.server_;
    if (server) ++w_.visits_;
  }
  ~Visit() {
    if (!server) return;
    std::lock_guard lock(w_.mutex_);
    if (--w_.visits_ == 0) w_.left_.notify_all();
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  Server* server;

 private:
  Waiters& w_;
};

void Waiters::help(const Call& call) {
  if (Visit visit(*this); visit.server) visit.server->help(call);
}

void Waiters::hurry() {
  if (Visit visit(*this); visit.server) visit.server->hurry();
}

void Waiters::retire() {
  std::unique_lock lock(mutex_);
  server_ = nullptr;
  left_.wait(lock, [&] { return visits_ == 0; });
}

void Call::begin(const Collective& c, int rank, int size, Millis limit) {
  make_plan(c, rank, size, plan);
  site = c.site, timeout = limit, async = c.async;
  here = left = false;
  if (order || c.order) order = c.order;
  if (order) {
    digest = digest_of(order->calls);
    plan.record.order = digest.whole;
  }
  birth_ = fork_count.load(std::memory_order_relaxed);
  state_.store(kPending, std::memory_order_relaxed);
  if (error_) error_ = nullptr;
  started_ = {};
  elapsed_ms_ = 0;
  for (const Tensor& t : c.in) keep(t);
  if (c.out.data() != c.in.data() || c.out.size() != c.in.size())  // else they are the same
    for (const Tensor& t : c.out) keep(t);
  for (const Tensor& t : c.out)
    for (const Ref<Event>& reader : t.storage()->readers())
      if (!reader->done()) readers_.push_back(reader);
}

void Call::begin_part(const Call& whole, const Plan& p, Millis limit) {
  plan = p;
  plan.record = whole.plan.record;
  plan.record.order = 0;  // the whole call's order was compared already
  site = whole.site, timeout = limit, async = whole.async;
  waiters = whole.waiters;
  birth_ = whole.birth_;
}

void Call::keep(const Tensor& t) {
  if (async) tensors_.push_back(t);  // for a synchronous call the caller holds them while it waits
  const Ref<Event>& ready = t.storage()->ready();
  if (ready && !ready->done()) before_.push_back(ready);
}

bool Call::inputs_ready() const {
  bool ready = true;
  for (const auto* events : {&before_, &readers_})
    for (const Ref<Event>& e : *events)
      if (!e->done()) e->hurry(), ready = false;
  return ready;
}

void Call::begin_profile(const std::string& group) {
  profile_ = Ref<Profile>(current_profile());
  if (profile_) lane_ = group;
}

void Call::wait_for_inputs_slow() {
  for (Ref<Event>& e : readers_) {
    try {
      e->wait();
    } catch (...) {  // the failed call reads no more; its own result carries the error
    }
  }
  for (Ref<Event>& e : before_) e->wait();
  readers_.clear();
  before_.clear();
}

void Call::start_clock() {
  started_ = Clock::now();
  if (profile_) begin_us_ = profile_->now_us();
}

void Call::finish(std::exception_ptr error) {
  if (done()) return;
  Tensors tensors;
  if (async)
    // Released last: a storage waits for this event when it is destroyed.
    std::swap(tensors, tensors_);
  readers_.clear();
  before_.clear();
  error_ = std::move(error);
  const bool started = started_ != Clock::time_point();
  if (started)
    elapsed_ms_ = std::chrono::duration<double, std::milli>(Clock::now() - started_).count();
  if (profile_) {
    // Both times are from the profile's clock: this thread may be suspended between readings of two
    // clocks.
    const double end = profile_->now_us(), begin = started ? begin_us_ : end;
    profile_->add({.name = std::string(name_of(plan.kind)),
                   .category = "collective",
                   .lane = lane_,
                   .detail = title() + " at " + describe(site),
                   .begin_us = begin,
                   .took_us = end - begin,
                   .own_us = end - begin});
  }
  State outcome = error_ ? kFailed : kDone;
  if (here) return state_.store(outcome, std::memory_order_release);
  {
    std::lock_guard lock(mutex_);
    hurry_.reset();
    state_.store(outcome, std::memory_order_release);
  }
  finished_.notify_all();
}

void Call::rethrow() const {
  if (state_.load(std::memory_order_acquire) == kFailed) std::rethrow_exception(error_);
}

// In a forked child no thread finishes the call, and it does not touch the child's memory.
void Call::check_process() const {
  if (forks() != birth_)
    throw CommError(fmt::format("{} was under way when this process was forked; its result is the "
                                "parent's",
                                title()),
                    "", seq(), {});
}

void Call::wait() {
  if (!done()) {
    check_process();
    ProfileSpan span("wait", "wait");
    if (span) span.set_detail(title());
    Waiters::Scope scope(waiters);
    waiters->help(*this);
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [&] { return done(); });
  }
  rethrow();
}

bool Call::wait_for(Millis timeout) {
  if (!done()) {
    check_process();
    Waiters::Scope scope(waiters);
    waiters->hurry();
    std::unique_lock lock(mutex_);
    if (!finished_.wait_for(lock, timeout, [&] { return done(); })) {
      lock.unlock();
      hurry();
      return false;
    }
  }
  rethrow();
  return true;
}

void Call::hurry() {
  if (forks() != birth_) return;
  {
    std::lock_guard lock(mutex_);
    if (done() || hurry_) return;
    hurry_.emplace(waiters);
  }
  waiters->hurry();
}

std::string Call::title() const { return fmt::format("{} #{}", name_of(plan.record.kind), seq()); }

std::string Call::title(const std::string& group) const {
  return fmt::format("{} on {} ({})", title(), group, describe(site));
}

Ref<Storage> Engine::allocate(size_t bytes) {
  return make_ref<Storage>(bytes, kCPU, cpu_allocator());
}

void run_alone(const Plan& plan) {
  if (!plan.takes || !plan.gives()) return;
  const Part &from = plan.give[0], &to = plan.take[0];
  if (plan.reduces) {
    std::vector<std::byte> copy;  // the result would overwrite what is still to be read
    const void* source = plan.must_stage() ? copied(plan.give, copy)[0].data : from.data;
    reduce_tree(plan.op, plan.dtype, to.data, {&source, 1},
                to.bytes / int64_t(size_of(plan.dtype)));
  } else if (from.data != to.data && from.bytes) {
    std::memmove(to.data, from.data, size_t(from.bytes));
  }
}

namespace {

class SoloEngine final : public Engine {
 public:
  std::string_view name() const override { return "solo"; }
  void run(Call& call) override { run_alone(call.plan); }
  void run_p2p(const Ref<Call>&, FunctionRef<Ref<Call>()>) override {
    throw BugError("send: reached a group of one rank, where no peer is valid");
  }
  void abort(const CommError&) override {}
};

}  // namespace

std::unique_ptr<Engine> make_solo_engine() { return std::make_unique<SoloEngine>(); }

}  // namespace tessera::detail
