// What a backend implements: executing one call at a time on the calling thread. Queueing, order,
// checking of arguments and remembering the first failure are BackendGroup's. Invariant: an engine
// that throws is dead, and has told its peers why as far as they can be told.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "collectives/plan.h"
#include "core/base/function_ref.h"
#include "core/base/profile.h"

namespace tessera::detail {

/// How often this process has been a fork's child since it started: 0 unless someone forks. Counted
/// from the first call on.
int forks();
/// The count, for who has called that before.
inline std::atomic<int> fork_count{0};

class Call;

/// The threads that are held up by calls of a group. While there are any, who executes the calls
/// need not leave them its core.
class Waiters final : public RefCounted {
 public:
  /// Who executes the calls of a group.
  class Server {
   public:
    /// On a thread that is held up by `call`: executes what is queued up to it, or sees to it that
    /// somebody does.
    virtual void help(const Call& call) = 0;
    /// A thread is held up that cannot help.
    virtual void hurry() = 0;

   protected:
    ~Server() = default;
  };

  explicit Waiters(Server* server) : server_(server) {}
  int count() const { return count_.load(std::memory_order_seq_cst); }
  bool any() const { return count_.load(std::memory_order_relaxed) > 0; }
  void help(const Call& call);
  void hurry();
  /// The server is about to go. Waits for those who help.
  void retire();

  /// A thread that is held up for as long as this lives.
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
  Server* server_;  // null: gone
  int visits_ = 0;  // threads that use it now
};

/// One submitted collective: its plan, what keeps its memory alive, and its outcome.
class Call final : public Work {
 public:
  /// Becomes `c` of rank `rank` of `size`; what it was before is over. Throws as make_plan, and is
  /// then nothing that may be used but for beginning again.
  void begin(const Collective& c, int rank, int size, Millis limit);
  /// Becomes a part of `whole`, which outlives it: what moves the pieces of `p` within `limit`.
  void begin_part(const Call& whole, const Plan& p, Millis limit);

  bool done() const override { return state_.load(std::memory_order_acquire) != kPending; }
  void wait() override;
  bool wait_for(Millis timeout) override;
  /// From now on a thread is held up by it.
  void hurry() override;
  std::exception_ptr error() const override { return done() ? error_ : nullptr; }
  uint64_t seq() const override { return plan.record.seq; }
  double elapsed_ms() const override { return done() ? elapsed_ms_ : 0; }

  /// Records it in the profile of the thread that made it, as an event of `group`.
  void profile_as(const std::string& group) {
    if (profile_ || current_profile()) [[unlikely]]
      begin_profile(group);
  }
  /// Whether somebody may ask how long it took; a small call that is waited for takes no longer
  /// than two looks at the clock.
  bool timed() const { return async || profile_; }
  /// Whether wait_for_inputs would return at once; what it would wait for is hurried.
  bool inputs_ready() const;
  /// Waits for the writes that were pending on its tensors when it was submitted, and for those who
  /// still read what it overwrites.
  void wait_for_inputs() {
    if (!before_.empty() || !readers_.empty()) [[unlikely]]
      wait_for_inputs_slow();
  }
  /// It is executed from now on.
  void start() {
    if (timed()) start_clock();
  }
  /// Publishes the outcome (null: success) and lets go of the tensors.
  void finish(std::exception_ptr error);
  /// The same for success where nobody else knows the call, nor asks how long it took.
  void succeed_here() { state_.store(kDone, std::memory_order_release); }
  /// "all_reduce #41".
  std::string title() const;
  /// "all_reduce #41 on world (train.cpp:88)".
  std::string title(const std::string& group) const;

  // Written by begin alone.
  Plan plan;
  CallSite site;
  Millis timeout{};
  bool async = false;
  Ref<const CallOrder> order;  // null: nothing is announced
  OrderDigest digest;          // of it, if there is one
  /// Whether only the thread that submitted it knows it until it is done.
  bool here = false;
  // A thread that waits for it may execute it. If so, when it was queued.
  bool left = false;
  std::chrono::steady_clock::time_point queued;
  Ref<Waiters> waiters;  // of its group; null for who runs it where it was submitted
  /// Whether a thread is held up by it, or by a call that follows it.
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
  std::chrono::steady_clock::time_point started_;  // zero: not yet, or nobody asks
  double elapsed_ms_ = 0;
  Ref<Profile> profile_;  // null: not recorded
  double begin_us_ = 0;   // in it
  std::string lane_;      // in it
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
  /// Executes `first`, a send or recv, together with those that `next` yields (null when there is
  /// none right now) until all of them are finished; calls `finish` of each.
  virtual void run_p2p(const Ref<Call>& first, FunctionRef<Ref<Call>()> next) = 0;
  /// From any thread: run_p2p should ask `next` again, and who sleeps meanwhile look whether a
  /// thread has begun to wait.
  virtual void interrupt() {}
  /// From any thread: another call stands behind the one that is being executed.
  virtual void call_queued() {}
  /// Whether a collective is best executed by the thread that waits for it, since the rank has no
  /// CPU for another beside its program.
  virtual bool leaves_to_waiters(const Call&) const { return false; }
  /// From any thread: fails calls under way, here and on every peer, with `error`.
  virtual void abort(const CommError& error) = 0;
  /// Memory for the group's tensors; see ProcessGroup::allocate.
  virtual Ref<Storage> allocate(size_t bytes);
  virtual bool has_own_memory() const { return false; }
};

/// What surrounds an engine: who is in the group and how its members are called in errors.
struct Membership {
  std::string group;             // name of the group
  int rank = 0, size = 1;        // in the group
  std::vector<int> world_ranks;  // of the members
  // Where this is a block of a group (messages/hierarchical.h), its rank 0 has this rank in the
  // group, and errors name the members of the block by their ranks there; -1: this is a whole
  // group.
  int first = -1;
  /// Rank `r` as errors name it.
  int number(int r) const { return first < 0 ? r : first + r; }
};

/// A group of one rank: results are copies.
std::unique_ptr<Engine> make_solo_engine();

/// Copies this rank's own pieces to where its own results go; all of a plan of one rank.
void run_alone(const Plan& plan);

}  // namespace tessera::detail
