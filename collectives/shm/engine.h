// The shared-memory algorithm, for ranks that are threads (loopback) or processes of one host
// (shm). A collective is a sequence of phases: every rank writes what it gives into its staging
// area, posts the phase, waits until all ranks have posted it, and reads. The first phase carries
// the call's fingerprint, so a mismatch costs no extra round trip and is found before anything is
// written. Pieces that peers can reach (tensors of threads; for processes, tensors in a pool) are
// read where they lie instead, so after a call has failed a slow peer may still write to its
// tensors. Invariant: a rank posts phase k + 1 only after it has read what its peers gave in phase
// k. So a rank that has waited for phase k + 1 may overwrite what it gave in phase k, and two
// staging areas, used in turn, need no second flag.
#pragma once
#include <functional>
#include <optional>

#include "collectives/backend_name.h"
#include "collectives/engine.h"
#include "collectives/shm/pool.h"
#include "collectives/shm/segment.h"
#include "collectives/shm/tuner.h"
#include "collectives/watchdog.h"

namespace tessera::detail {

struct ShmOptions {
  bool processes = false;       // ranks are processes: watch their pids
  bool read_in_place = true;    // threads: large pieces are read where they lie
  std::optional<Way> way = {};  // of every all_reduce that has several ways; none: they are timed
  /// How long a dozing rank sleeps, if it is not woken, before it checks absent ranks. Calls whose
  /// deadline is nearer than ten times that never doze.
  Millis doze{100};
  /// The rank's watchdog. Null: calls have no deadline, and how a rank ended is not known.
  std::shared_ptr<Watchdog> watchdog = nullptr;
};

class ShmEngine final : public Engine {
 public:
  ShmEngine(Membership members, std::shared_ptr<Segment> segment, ShmOptions options);
  ~ShmEngine() override;

  std::string_view name() const override { return options_.processes ? kShm : kLoopback; }
  void run(Call& call) override;
  void run_p2p(const Ref<Call>& first, FunctionRef<Ref<Call>()> next) override;
  void interrupt() override;
  void call_queued() override;
  bool leaves_to_waiters(const Call& call) const override;
  void abort(const CommError& error) override;
  /// Allocates from the rank's pool, if it has one.
  Ref<Storage> allocate(size_t bytes) override;
  bool has_own_memory() const override { return options_.processes; }

 private:
  using Clock = std::chrono::steady_clock;
  // When sleeping peers are woken after a post: once all ranks have posted the phase, or later,
  // with another phase that follows in a moment.
  enum class Waking : uint8_t { kNow, kLater };
  // Where the peers being waited for are: elsewhere in their program, or at work on this call.
  enum class Peers : uint8_t { kElsewhere, kAtWork };
  class MessageWait;
  // A send or receive in progress; see p2p.cpp.
  struct Message {
    Ref<Call> call;
    int64_t moved = 0;    // bytes
    uint64_t chunks = 0;  // written or read
    bool started = false;
    Clock::time_point since;
    uint64_t suspicion = 0;  // the apparent deadlock seen last, and since when; 0: none
    Clock::time_point suspected;
    std::unique_ptr<MessageWait> watched;  // null until it has lasted long enough
  };
  // Reports a wait for the posted phase to the watchdog.
  class CollectiveWait final : public Watchdog::Wait {
   public:
    CollectiveWait(ShmEngine& engine, const Call& call)
        : engine_(engine), call_(call), phase_(engine.phase_) {}
    WaitFacts facts() const override;
    Millis timeout() const override { return call_.timeout; }
    std::string progress_of(int world_rank) const override;
    void fail(const CommError& error) override { engine_.abort(error); }

   private:
    ShmEngine& engine_;
    const Call& call_;
    const uint64_t phase_;
  };

  // engine.cpp moves data.
  bool find_places(const Plan& plan, Entry& entry);
  /// A summary of what all ranks have published with a call.
  struct CallSummary {
    bool same_call = true, direct = true, staged = true;
    bool new_pool = false;  // some rank has a pool that this group has not mapped yet
  };
  CallSummary read_entries(const CallRecord& mine);
  void publish_call(const Call& call);
  void post();
  bool by_slices(const Plan& plan) const;
  std::byte* area(int r) const {
    return swaps_ ? segment_->swap(r, phase_) : segment_->stage(r, int(phase_ & 1));
  }
  void stage(const Parts& give, int64_t begin, int64_t window);
  void consume(const Plan& plan, int64_t begin, int64_t window);
  void reduce_slices(Call& call, int64_t begin, int64_t window);
  void run_staged(Call& call, int64_t longest);
  void run_first(Call& call, int64_t window);
  void run_in_place(Call& call, Way way);
  void reduce_in_place(const Plan& plan, Way way);
  void take_in_place(const Plan& plan);
  int64_t agree_on_splits(Call& call);
  bool can_map_pools(Call& call, bool new_pool);
  bool map_pools(Call& call);
  std::byte* given(int r, size_t piece) const;
  std::byte* taken(int r) const;

  // wait.cpp waits, and finds out what went wrong meanwhile.
  void wait_all(Call& call, Waking waking = Waking::kNow, Peers peers = Peers::kAtWork) {
    for (int r = 0; r < size_; ++r)
      if (segment_->state(r).posted.load(std::memory_order_acquire) < phase_)
        return wait_slow(call, peers);
    if (waking == Waking::kNow) wake_peers();
  }
  void wait_slow(Call& call, Peers peers);
  int cpus_a_rank() const;
  bool has_room() const { return cpus_a_rank() > 0; }
  bool may_doze(const Call& call) const;
  int spins() const;  // rounds of polling before a blocked thread sleeps
  int polls(const Call& call, Peers peers) const;
  bool keep_polling(const Call& call, FunctionRef<bool()> ready, Clock::time_point* until);
  void wake_peers();
  bool all_posted(uint64_t phase) const;
  /// Sleeps until this rank's bell is rung, `ready` holds, or it is time to check absent ranks.
  /// Dozes if `call` permits it. Returns whether `ready` holds.
  bool park(FunctionRef<bool()> ready, const Call* call = nullptr);
  void ring(int r);
  void ring_all();
  void throw_if_failed();
  void check_deaths(const Call& call);
  std::vector<int> absent_ranks(uint64_t phase) const;
  WaitFacts facts_of(const Call& call) const;
  std::string progress_of(int r) const;
  bool is_gone(int r, Watchdog::EndReason* reason) const;
  void check_orders(const Call& call);
  [[noreturn]] void report_mismatch(Call& call);
  void publish_site(const Call& call);
  std::string name_of_rank(int r) const;
  /// Writes the failure unless the group has one already, and throws the group's failure.
  [[noreturn]] void fail_group(const Call& call, const std::string& text, std::vector<int> ranks,
                               std::vector<int> culprits = {});

  // p2p.cpp
  bool step(Message& m);
  bool step_send(Message& m);
  bool step_recv(Message& m);
  bool can_step(const Message& m) const;
  void inspect_p2p(Message& m, size_t n_active);
  std::string deadlock_with(const Message& m, size_t n_active, uint64_t* signature) const;

  const Membership members_;
  const std::shared_ptr<Segment> segment_;
  const ShmOptions options_;
  const int rank_, size_;
  RankState& me_;
  uint64_t phase_ = 0;  // phases posted by this rank
  // The number of collectives begun. The parts of a collective count separately here, though they
  // share its number.
  uint64_t turn_ = 0;
  std::atomic<uint64_t> awaited_{0};  // the phase that a dozing thread waits for
  StageTuner tuner_;
  PlaceTuner places_;
  // How this call is staged: in the rotating areas of Segment::swap, or else with streaming stores.
  bool swaps_ = false, past_caches_ = false;
  bool trial_ = false;  // this call is timed, so its ranks do not doze
  // A thread has been blocked by this call for long, so wake_peers wakes dozing peers too.
  bool wakes_dozing_ = false;
  mutable std::atomic<int> cpus_a_rank_{-1};  // -1: not known yet
  std::atomic<uint32_t> interrupts_{0};

  std::mutex pool_mutex_;
  Ref<Pool> pool_;                         // null until something is allocated in it
  bool no_pool_ = false;                   // the system gave none; this was logged
  std::atomic<Pool*> published_{nullptr};  // pool_, once its descriptor is written to the segment
  std::vector<Entry> entries_;             // of every rank, for the call in progress
  std::vector<std::byte*> bases_;  // where each rank's pool is mapped here; null between threads
  std::vector<PoolView> views_;
  std::vector<uint8_t> pool_tried_;  // by rank: 1 once every rank has tried to map its pool
  bool unreachable_ = false;         // some rank cannot map another's pool
};

}  // namespace tessera::detail
