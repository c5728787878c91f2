#include "collectives/backend_group.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <new>

#include "collectives/reduction.h"
#include "collectives/thread.h"
#include "core/base/parallel.h"

namespace tessera::detail {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

int forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return fork_count.load(std::memory_order_relaxed);
}

BackendGroup::BackendGroup(Membership members, std::unique_ptr<Engine> engine, Millis timeout,
                           Splitter splitter, std::shared_ptr<Watchdog> watchdog, Millis leave)
    : members_(std::move(members)),
      engine_(std::move(engine)),
      timeout_(timeout),
      leave_(leave),
      splitter_(std::move(splitter)),
      watchdog_(std::move(watchdog)),
      waiters_(make_ref<Waiters>(this)),
      birth_(forks()) {}

BackendGroup::~BackendGroup() {
  if (forks() != birth_) {  // a fork's child: threads and peers belong to the parent
    if (thread_.joinable()) thread_.detach();
    (void)engine_.release();
    // No thread of this process waits on these; their destructors would wait for the parent's
    // threads.
    new (&work_) std::condition_variable;
    new (&idle_) std::condition_variable;
    return;
  }
  {
    std::unique_lock lock(mutex_);
    wait_until_idle(lock);
    stop_ = true;
  }
  work_.notify_all();
  if (thread_.joinable()) thread_.join();
  waiters_->retire();
}

bool BackendGroup::supports(const Collective& c) const {
  for (auto tensors : {c.in, c.out})
    for (const Tensor& t : tensors) {
      if (!t.device().is_cpu()) return false;
      bool reduces = traits(c.kind).reduces;
      if (reduces && !reducible(c.op, t.dtype())) return false;
    }
  return true;
}

void BackendGroup::check_alive() const {
  TESSERA_CHECK(fork_count.load(std::memory_order_relaxed) == birth_,
                "{}: forked after init; a group stays with the process that made it, so call "
                "init_process_group in the child, or fork before it",
                members_.group);
}

Ref<Work> BackendGroup::submit(const Collective& c) {
  check_alive();
  if (dead_.load(std::memory_order_acquire)) std::rethrow_exception(failure());
  if (!c.async)
    if (Ref<Call> call = begin_here(c)) return run_here(std::move(call), c);
  return enqueue(c);
}

/// If no call is in progress, plans and numbers the call and lets its caller enter the engine.
/// Otherwise returns null.
Ref<Call> BackendGroup::begin_here(const Collective& c) {
  std::lock_guard lock(mutex_);
  if (busy_ || !queue_.empty()) return nullptr;
  if (!spare_ || spare_->use_count() != 1) spare_ = make_ref<Call>();
  Call& call = *spare_;
  call.begin(c, rank(), size(), limit_of(c));
  call.here = true;
  seal(call.plan.record, call.plan.is_p2p() ? ++messages_ : ++collectives_);
  busy_ = true;
  p2p_busy_ = call.plan.is_p2p();
  return spare_;
}

Ref<Work> BackendGroup::run_here(Ref<Call> call, const Collective& c) {
  call->profile_as(members_.group);
  for (const Tensor& t : c.out) t.storage()->bump_version();
  {
    ProfileSpan span("wait", "wait");
    execute(call);
  }
  {
    std::lock_guard lock(mutex_);
    busy_ = p2p_busy_ = false;
    if (!queue_.empty()) work_.notify_one();
    if (waiters_->any()) idle_.notify_all();
  }
  call->wait();
  return call;
}

Ref<Work> BackendGroup::enqueue(const Collective& c) {
  auto call = make_ref<Call>();
  call->begin(c, rank(), size(), limit_of(c));
  call->waiters = waiters_;
  call->profile_as(members_.group);
  for (const Tensor& t : c.out) {
    t.storage()->bump_version();
    if (c.async) t.storage()->set_ready(call);
  }
  if (c.async)  // a write to an operand waits for readers; a result is pending anyway
    for (const Tensor& t : c.in)
      if (t.storage()->ready() != call) t.storage()->add_reader(call);
  {
    std::lock_guard lock(mutex_);
    seal(call->plan.record, call->plan.is_p2p() ? ++messages_ : ++collectives_);
    call->left = !call->plan.is_p2p() && engine_->leaves_to_waiters(*call);
    if (call->left) call->queued = Clock::now();
    queue_.push_back(call);
    urgent_ += !call->left;
    if (!thread_.joinable()) thread_ = start_thread("tessera-comm", [this] { serve(); });
    if (p2p_busy_) engine_->interrupt();
    if (busy_) engine_->call_queued();
    if (asleep_ || urgent_ > 0) work_.notify_one();
  }
  if (!c.async) call->wait();
  return call;
}

void BackendGroup::serve() {
  set_num_threads(1);  // a write to what a checkpoint reads may copy it first, here too
  std::unique_lock lock(mutex_);
  while (await_call(lock)) execute_head(lock);
}

/// Waits until the communication thread should execute the head of the queue. Returns false when
/// the group is being destroyed.
bool BackendGroup::await_call(std::unique_lock<std::mutex>& lock) {
  for (uint64_t taken = taken_; !stop_; asleep_ = false) {
    const bool ready = !queue_.empty() && !busy_;
    const auto now = Clock::now();
    const auto until = (ready ? queue_.front()->queued : now) + leave_;
    if (ready && (urgent_ > 0 || waiters_->any() || dead_ || now >= until)) return true;
    // While calls that are left to waiters come and go, this thread looks by itself, so that no
    // call has to wake it.
    asleep_ = queue_.empty() && taken == taken_;
    taken = taken_;
    if (asleep_)
      work_.wait(lock);
    else
      work_.wait_until(lock, until);
  }
  return false;
}

void BackendGroup::execute_head(std::unique_lock<std::mutex>& lock) {
  Ref<Call> call = take_head();
  busy_ = true;
  p2p_busy_ = call->plan.is_p2p();
  lock.unlock();
  execute(call);
  call.reset();
  lock.lock();
  busy_ = p2p_busy_ = false;
  if (queue_.empty()) idle_.notify_all();
}

Ref<Call> BackendGroup::take_head() {
  Ref<Call> call = std::move(queue_.front());
  queue_.pop_front();
  taken_ += call->left;
  urgent_ -= !call->left;
  return call;
}

void BackendGroup::help(const Call& call) {
  {
    std::unique_lock lock(mutex_);
    while (!call.done() && !busy_ && !queue_.empty() && queue_.front()->left) execute_head(lock);
    const bool due = urgent_ > 0 || dead_ || !call.done() || waiters_->count() > 1;
    if (!queue_.empty() && due) work_.notify_one();
  }
  if (!call.done()) engine_->interrupt();
}

void BackendGroup::hurry() {
  {
    std::lock_guard lock(mutex_);
    work_.notify_one();
  }
  engine_->interrupt();
}

/// Waits until no call is queued or in progress.
void BackendGroup::wait_until_idle(std::unique_lock<std::mutex>& lock) {
  Waiters::Scope scope(waiters_);
  work_.notify_one();
  engine_->interrupt();
  idle_.wait(lock, [&] { return queue_.empty() && !busy_; });
}

void BackendGroup::execute(const Ref<Call>& call) {
  if (dead_.load(std::memory_order_acquire)) return call->finish(failure());
  call->start();
  try {
    call->wait_for_inputs();
    if (call->plan.is_p2p()) return execute_p2p(call);
    if (size() == 1)
      run_alone(call->plan);
    else
      engine_->run(*call);
    if (call->here && !call->timed()) return call->succeed_here();
    call->finish(nullptr);
  } catch (...) {
    call->finish(fail(std::current_exception(), call.get()));
  }
}

void BackendGroup::execute_p2p(const Ref<Call>& first) {
  std::vector<Ref<Call>> batch{first};
  try {
    engine_->run_p2p(first, [&]() -> Ref<Call> {
      Ref<Call> call = next_p2p();
      if (call) batch.push_back(call);
      return call;
    });
  } catch (...) {
    std::exception_ptr error = fail(std::current_exception(), first.get());
    for (const Ref<Call>& call : batch) call->finish(error);
  }
}

/// Returns the head of the queue if it is a send or a receive whose operands are ready, else null.
Ref<Call> BackendGroup::next_p2p() {
  std::unique_lock lock(mutex_);
  if (queue_.empty() || !queue_.front()->plan.is_p2p()) return nullptr;
  Ref<Call> call = queue_.front();
  lock.unlock();  // the operand may wait for another call of this group
  if (!call->inputs_ready()) return nullptr;
  lock.lock();
  take_head();
  lock.unlock();
  call->start();
  return call;
}

/// Records the first failure, kills the group with it and returns it.
std::exception_ptr BackendGroup::fail(std::exception_ptr error, const Call* call) {
  CommError report("", members_.group, 0, {});
  try {
    std::rethrow_exception(error);
  } catch (const CommError& e) {
    report = e;
  } catch (const std::exception& e) {
    std::string title = call ? call->title(members_.group) : members_.group;
    report = CommError(fmt::format("{}: rank {} failed: {}", title, rank(), e.what()),
                       members_.group, call ? call->seq() : 0, {rank()});
  }
  if (report.culprits().empty() && report.group() == members_.group) {
    std::vector<int> culprits;
    for (int r : report.ranks()) culprits.push_back(members_.world_ranks[size_t(r)]);
    report = CommError(report.what(), report.group(), report.seq(), report.ranks(), culprits);
  }
  error = std::make_exception_ptr(report);
  // The watchdog learns of the failure before any thread of this rank can see it, since the program
  // may give up because of it and then has to say why. The engine of peers in shared memory needs
  // no store, so they are told through it first.
  const bool first = watchdog_ && watchdog_->remember_failure(report);
  {
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = error;
    error = failure_;
    dead_.store(true, std::memory_order_release);
    work_.notify_one();
  }
  engine_->abort(report);
  if (first) watchdog_->publish_failure(report);
  return error;
}

std::exception_ptr BackendGroup::failure() {
  std::lock_guard lock(mutex_);
  return failure_;
}

void BackendGroup::abort(const std::string& why) {
  std::string text = fmt::format("{}: rank {} aborted the group: {}", members_.group,
                                 members_.world_ranks[size_t(rank())], why);
  uint64_t seq;
  {
    std::lock_guard lock(mutex_);
    seq = collectives_;
  }
  // If this rank has failed before, its program gives up because of that failure.
  const std::vector<int> culprits = watchdog_ ? watchdog_->culprits() : std::vector<int>();
  fail(std::make_exception_ptr(CommError(text, members_.group, seq, {rank()}, culprits)), nullptr);
}

void BackendGroup::working(std::string_view what) {
  if (watchdog_) watchdog_->working(members_.group, what);
}

void BackendGroup::flush() {
  check_alive();
  std::unique_lock lock(mutex_);
  wait_until_idle(lock);
  if (failure_) std::rethrow_exception(failure_);
}

Ref<ProcessGroup> BackendGroup::split(int color, int key, CallSite site) {
  std::array<int64_t, 2> mine{color, key};
  std::vector<int64_t> all(2 * size_t(size()));
  auto borrow = [](int64_t* p, size_t n) {
    return Tensor(Meta::contiguous({int64_t(n)}, kI64, kCPU),
                  make_ref<Storage>(p, n * sizeof(int64_t), kCPU, nullptr));
  };
  all_gather(borrow(all.data(), all.size()), borrow(mine.data(), 2), timeout_, site);
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r)
    if (all[size_t(2 * r)] == color) ranks.push_back(r);
  std::stable_sort(ranks.begin(), ranks.end(),
                   [&](int a, int b) { return all[size_t(2 * a + 1)] < all[size_t(2 * b + 1)]; });
  uint64_t number = ++splits_;
  if (color < 0) return nullptr;
  Membership sub;
  sub.group = fmt::format("{}/{}.{}", members_.group, number, color);
  sub.size = int(ranks.size());
  for (int i = 0; i < sub.size; ++i) {
    if (ranks[size_t(i)] == rank()) sub.rank = i;
    sub.world_ranks.push_back(members_.world_ranks[size_t(ranks[size_t(i)])]);
  }
  auto engine = sub.size == 1 ? make_solo_engine() : splitter_(sub, number);
  return Ref<ProcessGroup>(
      new BackendGroup(std::move(sub), std::move(engine), timeout_, splitter_, watchdog_));
}

}  // namespace tessera::detail
