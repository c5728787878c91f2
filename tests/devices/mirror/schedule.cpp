#include "schedule.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "core/base/deterministic.h"
#include "core/dispatch/kernel.h"

using namespace tessera;

namespace mirror {
namespace {

struct Queue;
// What is on a queue up to a position.
struct Mark {
  Queue* queue = nullptr;
  uint64_t position = 0;
};

struct Op {
  std::function<void()> run;  // null: it only waits
  Mark after;
  PlanSettings settings;
};

struct Queue {
  Device device;
  std::deque<Op> ops = {};
  uint64_t enqueued = 0, finished = 0;
  // The first error since the last that was thrown, and where. Later ops run on what is there.
  std::exception_ptr error = nullptr;
  uint64_t failed_at = 0;

  void fail(std::exception_ptr e) {
    if (!error) error = std::move(e), failed_at = finished + 1;
  }
};

bool has_run(const Mark& m) { return m.queue->finished >= m.position; }
bool has_failed(const Mark& m) { return m.queue->error && m.queue->failed_at <= m.position; }
bool may_run(const Queue& q) {
  return !q.ops.empty() && (!q.ops.front().after.queue || has_run(q.ops.front().after));
}

class SettingsScope {
 public:
  explicit SettingsScope(const PlanSettings& s)
      : old_threads_(num_threads()), deterministic_(s.deterministic) {
    if (s.threads != old_threads_) set_num_threads(s.threads);
  }
  ~SettingsScope() { set_num_threads(old_threads_); }

 private:
  const int old_threads_;
  DeterministicScope deterministic_;
};

class Scheduler {
 public:
  Scheduler() {
    const char* seed = std::getenv("MIRROR_SEED");
    if (seed && *seed) seed_with(std::stoull(seed));
  }
  void seed_with(std::optional<uint64_t> seed) {
    std::lock_guard lock(mutex_);
    random_.reset();
    if (seed) random_.emplace(*seed);
  }

  Queue* take_queue(Device device) {
    std::lock_guard lock(mutex_);
    const auto at = std::ranges::find(unused_, device, &Queue::device);
    if (at == unused_.end()) return queues_.emplace_back(new Queue{.device = device});
    Queue* q = *at;
    unused_.erase(at);
    return q;
  }
  void leave_queue(Queue* q) {
    std::lock_guard lock(mutex_);
    unused_.push_back(q);
  }

  void enqueue(Queue& q, std::function<void()> run, Mark after = {}) {
    std::lock_guard lock(mutex_);
    q.ops.push_back({std::move(run), after, PlanSettings::of_thread()});
    ++q.enqueued;
    if (!random_ || running_) return;
    while ((*random_)() % 4 == 0)
      if (Queue* next = drawn()) run_one(*next);
  }
  Mark end_of(Queue& q) {
    std::lock_guard lock(mutex_);
    return {&q, q.enqueued};
  }
  bool done(const Mark& m) {
    std::lock_guard lock(mutex_);
    return has_run(m);
  }
  void wait(const Mark& m) {
    std::lock_guard lock(mutex_);
    TESSERA_ASSERT(!running_, "mirror: an op waits for another one");
    ++host_waits_;
    while (!has_run(m)) run_one(random_ ? *drawn() : needed(*m.queue));
    if (has_failed(m)) std::rethrow_exception(std::exchange(m.queue->error, nullptr));
  }
  int64_t host_waits() const { return host_waits_; }

 private:
  // An op that `q` cannot go on without. Marks are older than what waits for them, so this ends.
  Queue& needed(Queue& q) {
    Queue* at = &q;
    while (!may_run(*at)) at = at->ops.front().after.queue;
    return *at;
  }
  // Mostly the queue of the last op, so that some queue is often far ahead of the others.
  Queue* drawn() {
    if (last_ && may_run(*last_) && (*random_)() % 8 != 0) return last_;
    std::vector<Queue*> ready;
    for (Queue* q : queues_)
      if (may_run(*q)) ready.push_back(q);
    return last_ = ready.empty() ? nullptr : ready[(*random_)() % ready.size()];
  }
  void run_one(Queue& q) {
    Op op = std::move(q.ops.front());
    q.ops.pop_front();
    running_ = true;
    if (op.after.queue && has_failed(op.after)) q.fail(op.after.queue->error);
    try {
      SettingsScope settings(op.settings);
      if (op.run) op.run();
    } catch (...) {
      q.fail(std::current_exception());
    }
    op.run = nullptr;  // frees what it holds, which may come back here
    running_ = false;
    ++q.finished;
  }

  std::recursive_mutex mutex_;  // what an op frees is freed under it
  std::vector<Queue*> queues_, unused_;
  Queue* last_ = nullptr;
  bool running_ = false;
  std::atomic<int64_t> host_waits_ = 0;
  std::optional<std::mt19937_64> random_;
};

// Never destroyed: storages of static objects end later.
Scheduler& scheduler() {
  static Scheduler& one = *new Scheduler;
  return one;
}
std::atomic<bool> waits_are_lost = false;

// Those of one thread on one device.
struct ThreadQueues {
  std::array<Queue*, 5> own = {};  // for kernels, and by turn of a copy stream
  Queue* current = nullptr;        // that kernels run on
};

struct AllThreadQueues {
  std::map<int, ThreadQueues> devices = {};  // by index
  ThreadQueues& of(Device device) {
    ThreadQueues& t = devices[device.index];
    if (t.current) return t;
    for (Queue*& q : t.own) q = scheduler().take_queue(device);
    t.current = t.own[0];
    return t;
  }
  ~AllThreadQueues() {
    for (auto& [index, t] : devices)
      for (Queue* q : t.own) scheduler().leave_queue(q);
  }
};
thread_local AllThreadQueues mine;

Queue& queue_of(const Stream& s) { return *static_cast<Queue*>(s.handle); }

class MirrorEvent final : public Event {
 public:
  explicit MirrorEvent(const Mark& mark) : mark_(mark) {}
  bool done() const override { return scheduler().done(mark_); }
  void wait() override { scheduler().wait(mark_); }
  void wait_on(const Stream& stream) override {
    if (stream.device.kind != mark_.queue->device.kind) return wait();
    if (stream.handle != mark_.queue && !waits_are_lost)
      scheduler().enqueue(queue_of(stream), nullptr, mark_);
  }

 private:
  const Mark mark_;
};

}  // namespace

void set_seed(std::optional<uint64_t> seed) { scheduler().seed_with(seed); }
void lose_stream_waits(bool on) { waits_are_lost = on; }
int64_t host_waits() { return scheduler().host_waits(); }

Stream stream_of_thread(Device device) { return {device, mine.of(device).current}; }

Stream copy_stream_of_thread(Device device, int turn) {
  return {device, mine.of(device).own[size_t(1 + turn)]};
}

Stream exchange_stream(const Stream& stream) {
  Queue*& current = mine.of(stream.device).current;
  return {stream.device, std::exchange(current, &queue_of(stream))};
}

void enqueue(const Stream& stream, std::function<void()> run) {
  scheduler().enqueue(queue_of(stream), std::move(run));
}

Ref<Event> record(const Stream& stream) {
  const Mark end = scheduler().end_of(queue_of(stream));
  if (scheduler().done(end)) return nullptr;
  return make_ref<MirrorEvent>(end);
}

void synchronize(const Stream& stream) { scheduler().wait(scheduler().end_of(queue_of(stream))); }

}  // namespace mirror
