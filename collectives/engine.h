// The interface of a backend: it executes one call at a time on the calling thread. BackendGroup
// does the queueing, the order, the checks of arguments, and remembers the first failure.
// Invariant: an engine that throws is dead, and has told its peers why as far as it can reach them.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "collectives/host_names.h"
#include "collectives/plan.h"
#include "core/base/function_ref.h"
#include "core/base/profile.h"

namespace tessera::detail {

/// The number of forks between this process and the one that first called this: 0 unless a process
/// forks.
int forks();
/// The count that forks() returns, for code that runs after its first call.
inline std::atomic<int> fork_count{0};

class Call;

/// The threads that are blocked by calls of a group. While there are any, the thread that executes
/// the calls need not leave its core to the program.
class Waiters final : public RefCounted {
 public:
  /// The object that executes the calls of a group.
  class Server {
   public:
    /// Called on a thread that is blocked by `call`: executes what is queued up to it, or makes
    /// sure that another thread does.
    virtual void help(const Call& call) = 0;
    /// Called when a thread is blocked that cannot help.
    virtual void hurry() = 0;

   protected:
    ~Server() = default;
  };

  explicit Waiters(Server* server) : server_(server) {}
  int count() const { return count_.load(std::memory_order_seq_cst); }
  bool any() const { return count_.load(std::memory_order_relaxed) > 0; }
  void help(const Call& call);
  void hurry();
  /// Called before the server is destroyed. Waits for threads that are helping.
  void retire();

  /// Counts the current thread as blocked while this object lives.
  class Scope {
   public:
    explicit Scope(Ref<Waiters> waiters) : waiters_(std::move(waiters)) {
      waiters_->count_.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Scope() { waiters_->count_.fetch_sub(1, std::memory_order_relaxed); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const Ref<Waiters> waiters_;
  };

 private:
  class Visit;
  std::atomic<int> count_{0};
  std::mutex mutex_;
  std::condition_variable left_;
  Server* server_;  // null once it was retired
  int visits_ = 0;  // threads that use the server now
};

/// One submitted collective: its plan, what keeps its memory alive, and its outcome.
class Call final : public Work {
 public:
  /// Makes this the call `c` of rank `rank` of `size`, replacing a call that is over. Throws what
  /// make_plan throws; after that, only begin() may be called.
  void begin(const Collective& c, int rank, int size, Millis limit);
  /// Makes this a part of `whole`, which must outlive it: it moves the pieces of `p` within
  /// `limit`.
  void begin_part(const Call& whole, const Plan& p, Millis limit);

  bool done() const override { return state_.load(std::memory_order_acquire) != kPending; }
  void wait() override;
  bool wait_for(Millis timeout) override;
  /// Says that a thread is now blocked by this call.
  void hurry() override;
  std::exception_ptr error() const override { return done() ? error_ : nullptr; }
  uint64_t seq() const override { return plan.record.seq; }
  double elapsed_ms() const override { return done() ? elapsed_ms_ : 0; }

  /// Records the call in the profile of the thread that made it, as an event of `group`.
  void profile_as(const std::string& group) {
    if (profile_ || current_profile()) [[unlikely]]
      begin_profile(group);
  }
  /// Whether the time the call took may be asked for. A small synchronous call takes no longer than
  /// reading the clock twice, so it is not timed.
  bool timed() const { return async || profile_; }
  /// Whether wait_for_inputs would return at once. If not, hurries what it would wait for.
  bool inputs_ready() const;
  /// Waits for the writes that were pending on the call's tensors when it was submitted, and for
  /// readers of what it overwrites.
  void wait_for_inputs() {
    if (!before_.empty() || !readers_.empty()) [[unlikely]]
      wait_for_inputs_slow();
  }
  /// Notes that execution of the call begins.
  void start() {
    if (timed()) start_clock();
  }
  /// Publishes the outcome (null: success) and releases the tensors.
  void finish(std::exception_ptr error);
  /// Does the same for success, if only this thread knows the call and its time is not asked for.
  void succeed_here() { state_.store(kDone, std::memory_order_release); }
  /// "all_reduce #41".
  std::string title() const;
  /// "all_reduce #41 on world (train.cpp:88)".
  std::string title(const std::string& group) const;

  // Only begin writes these.
  Plan plan;
  CallSite site;
  Millis timeout{};
  bool async = false;
  Ref<const CallOrder> order;  // null: nothing is announced
  OrderDigest digest;          // the digest of `order`, if there is one
  /// Whether only the submitting thread knows the call until it is done.
  bool here = false;
  // Whether a thread that waits for the call may execute it; if so, `queued` is when it was queued.
  bool left = false;
  std::chrono::steady_clock::time_point queued;
  Ref<Waiters> waiters;  // the group's; null for a call that runs where it was submitted
  /// Whether a thread is blocked by this call or by a later one.
  bool waited_for() const { return !async || (waiters && waiters->any()); }

 private:
  enum State : uint32_t { kPending, kDone, kFailed };
  void keep(const Tensor& t);
  void begin_profile(const std::string& group);
  void wait_for_inputs_slow();
  void rethrow() const;
  void start_clock();
  void check_process() const;

  int birth_ = 0;
  Tensors tensors_;
  SmallVector<Ref<Event>, 2> before_, readers_;
  std::atomic<uint32_t> state_{kPending};
  std::exception_ptr error_;
  std::chrono::steady_clock::time_point started_;  // zero: not started, or not timed
  double elapsed_ms_ = 0;
  Ref<Profile> profile_;  // null: not recorded
  double begin_us_ = 0;   // its times in the profile
  std::string lane_;      // its lane in the profile
  std::mutex mutex_;
  std::condition_variable finished_;
  std::optional<Waiters::Scope> hurry_;
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual std::string_view name() const = 0;
  /// Executes a collective. Throws CommError.
  virtual void run(Call& call) = 0;
  /// Executes `first`, a send or recv, together with those that `next` returns (null when there is
  /// none at the moment) until all of them are finished; calls finish() of each.
  virtual void run_p2p(const Ref<Call>& first, FunctionRef<Ref<Call>()> next) = 0;
  /// May be called from any thread: makes run_p2p ask `next` again, and makes a sleeping thread
  /// check whether another has begun to wait.
  virtual void interrupt() {}
  /// May be called from any thread: another call was queued behind the one being executed.
  virtual void call_queued() {}
  /// Whether the thread that waits for a collective should execute it, because the rank has no CPU
  /// for a thread beside its program.
  virtual bool leaves_to_waiters(const Call&) const { return false; }
  /// May be called from any thread: fails calls in progress, here and on every peer, with `error`.
  virtual void abort(const CommError& error) = 0;
  /// Allocates memory for the group's tensors; see ProcessGroup::allocate.
  virtual Ref<Storage> allocate(size_t bytes);
  virtual bool has_own_memory() const { return false; }
};

/// What an engine knows of its group: the members, and their numbers in error texts.
struct Membership {
  std::string group;             // name of the group
  int rank = 0, size = 1;        // in the group
  std::vector<int> world_ranks;  // of the members
  // The number of this group's rank 0 in errors, if this is a block of a group
  // (messages/hierarchical.h): errors name the members of a block by their ranks in the whole
  // group. -1: this is a whole group.
  int first = -1;
  HostNames hosts = nullptr;
  /// The number of rank `r` in errors.
  int number(int r) const { return first < 0 ? r : first + r; }
};

/// Makes the engine of a group of one rank: its results are copies.
std::unique_ptr<Engine> make_solo_engine();

/// Copies this rank's own pieces to where its own results go, which is all that a plan of one rank
/// needs.
void run_alone(const Plan& plan);

}  // namespace tessera::detail
