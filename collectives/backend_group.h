// A process group over one engine: it checks the arguments of a call, numbers it, keeps calls in
// the order of submission and remembers the first failure. A synchronous call runs on its caller's
// thread when no other call is in progress; all others run on the group's communication thread,
// which the first asynchronous call starts. The engine may leave a call to the thread that waits
// for it. The communication thread runs it instead once it has been queued for a while, or where
// the waiting thread cannot run it. Sends and receives are never left to a waiting thread, because
// they may take longer than the call that it waits for. Invariants: at most one thread is inside
// the engine, and only that thread takes calls from the queue.
#pragma once
#include <deque>
#include <functional>
#include <thread>

#include "collectives/engine.h"
#include "collectives/watchdog.h"

namespace tessera::detail {

class BackendGroup final : public ProcessGroup, public Waiters::Server {
 public:
  /// Makes the engine of a sub-group. All its members must call it.
  using Splitter =
      std::function<std::unique_ptr<Engine>(const Membership& members, uint64_t number)>;

  /// How long a call is left to a thread that may wait for it. The step of a small model is over by
  /// then; in the step of a large one, waking the communication thread costs nothing in comparison.
  static constexpr Millis kLeave{20};

  /// `watchdog` is the rank's; null where no peer can cause a failure.
  BackendGroup(Membership members, std::unique_ptr<Engine> engine, Millis timeout,
               Splitter splitter, std::shared_ptr<Watchdog> watchdog = nullptr,
               Millis leave = kLeave);
  ~BackendGroup() override;

  int rank() const override { return members_.rank; }
  int size() const override { return members_.size; }
  const std::string& name() const override { return members_.group; }
  std::string_view backend(Device) const override { return engine_->name(); }
  bool supports(const Collective& c) const override;
  Ref<Work> submit(const Collective& c) override;
  Ref<ProcessGroup> split(int color, int key, CallSite site) override;
  void abort(const std::string& why) override;
  void flush() override;
  Ref<Storage> allocate(size_t bytes, Device) override { return engine_->allocate(bytes); }
  bool has_own_memory(Device) const override { return engine_->has_own_memory(); }
  int global_rank(int r) const override { return members_.world_ranks[size_t(r)]; }
  Millis timeout() const override { return timeout_; }
  void working(std::string_view what) override;

 private:
  Millis limit_of(const Collective& c) const {
    return c.timeout.count() > 0 ? c.timeout : timeout_;
  }
  Ref<Call> begin_here(const Collective& c);
  Ref<Work> run_here(Ref<Call> call, const Collective& c);
  Ref<Work> enqueue(const Collective& c);
  void serve();
  bool await_call(std::unique_lock<std::mutex>& lock);
  void execute_head(std::unique_lock<std::mutex>& lock);
  Ref<Call> take_head();
  void wait_until_idle(std::unique_lock<std::mutex>& lock);
  void help(const Call& call) override;
  void hurry() override;
  void execute(const Ref<Call>& call);
  void execute_p2p(const Ref<Call>& first);
  Ref<Call> next_p2p();
  std::exception_ptr fail(std::exception_ptr error, const Call* call);
  std::exception_ptr failure();
  void check_alive() const;

  const Membership members_;
  std::unique_ptr<Engine> engine_;
  const Millis timeout_, leave_;
  const Splitter splitter_;
  const std::shared_ptr<Watchdog> watchdog_;
  const Ref<Waiters> waiters_;
  const int birth_;  // process generation; see forks()
  uint64_t splits_ = 0;

  std::mutex mutex_;
  std::condition_variable work_;  // for the communication thread
  // Signalled when the queue is empty and no thread is inside the engine.
  std::condition_variable idle_;
  std::deque<Ref<Call>> queue_;
  int urgent_ = 0;         // queued calls that are not left to waiters
  uint64_t taken_ = 0;     // calls left to waiters that were taken from the queue so far
  bool asleep_ = false;    // the communication thread sleeps until it is notified
  bool busy_ = false;      // a thread is inside the engine
  bool p2p_busy_ = false;  // and accepts further sends and receives
  bool stop_ = false;
  uint64_t collectives_ = 0, messages_ = 0;
  std::exception_ptr failure_;
  Ref<Call> spare_;  // the last call that ran on its caller, reused when only this group holds it
  std::atomic<bool> dead_{false};
  std::thread thread_;
};

}  // namespace tessera::detail
