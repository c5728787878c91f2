// The shared-memory algorithm, for ranks that are threads (loopback) or processes of one host
// (shm). A collective is a sequence of phases: every rank writes what it gives into its staging
// area, posts the phase, waits until all ranks have posted it, and reads. The first phase carries
// the call's fingerprint, so a mismatch costs no extra round trip and is found before anything is
// written. What lies where peers reach it (tensors of threads, and of processes those in a pool) is
// read there instead. A tensor of a call that failed may still be written by a slow peer.
// Invariant: what is read between waiting for phase k and posting phase k + 1
// may be overwritten after waiting for phase k + 1, because then nobody reads it any more; so two
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
  std::optional<Way> way = {};  // of each all_reduce that could go several; none: found by trying
  /// How long a rank dozes that nobody wakes, until it looks at absent ranks. Calls whose deadline
  /// is nearer than ten times that never doze.
  Millis doze{100};
  /// The rank's. Null: calls have no deadline, and nobody knows how a rank ended.
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
  /// From the rank's pool, where it gets one.
  Ref<Storage> allocate(size_t bytes) override;
  bool has_own_memory() const override { return options_.processes; }

 private:
  using Clock = std::chrono::steady_clock;
  // When a peer that sleeps learns of the phase that was posted: once it is posted by all, or
  // later, with a phase that follows in a moment.
  enum class Waking : uint8_t { kNow, kLater };
  // What peers are at that are waited for: their program, or their part of this call.
  enum class Peers : uint8_t { kElsewhere, kAtWork };
  class MessageWait;
  // A send or receive under way; see p2p.cpp.
  struct Message {
    Ref<Call> call;
    int64_t moved = 0;    // bytes
    uint64_t chunks = 0;  // written or read
    bool started = false;
    Clock::time_point since;
    uint64_t suspicion = 0;  // what looked like a deadlock when last looked at, and since when
    Clock::time_point suspected;
    std::unique_ptr<MessageWait> watched;  // null: it has not lasted long enough
  };
  // What the watchdog sees of a wait for the phase that has been posted.
  class CollectiveWait final : public Watchdog::Wait {
   public:
    CollectiveWait(ShmEngine& engine, const Call& call)
        : engine_(engine), call_(call), phase_(engine.phase_) {}
    WaitFacts facts() const override;
    Millis timeout() const override { return call_.timeout; }
    std::string story(int world_rank) const override;
    void fail(const CommError& error) override { engine_.abort(error); }

   private:
    ShmEngine& engine_;
    const Call& call_;
    const uint64_t phase_;
  };

  // engine.cpp: moving data.
  bool find_places(const Plan& plan, Entry& entry);
  /// What all ranks have published with a call, taken together.
  struct Heard {
    bool same_call = true, direct = true, staged = true;
    bool news = false;  // a pool that this group has not met
  };
  Heard listen(const CallRecord& mine);
  void tell(const Call& call);
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
  bool reach_pools(Call& call, bool news);
  bool meet_pools(Call& call);
  std::byte* given(int r, size_t piece) const;
  std::byte* taken(int r) const;

  // wait.cpp: waiting, and what can be wrong meanwhile.
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
  int spins() const;  // rounds of polling before who is held up sleeps
  int polls(const Call& call, Peers peers) const;
  bool stay_awake(const Call& call, FunctionRef<bool()> ready, Clock::time_point* until);
  void wake_peers();
  bool all_posted(uint64_t phase) const;
  /// Sleeps until rung, `ready`, or some time has passed, soon enough to look at absent ranks. True
  /// when ready. Dozes where `call` may.
  bool park(FunctionRef<bool()> ready, const Call* call = nullptr);
  void ring(int r);
  void ring_all();
  void check_obituary();
  void check_deaths(const Call& call);
  std::vector<int> absent_ranks(uint64_t phase) const;
  WaitFacts facts_of(const Call& call) const;
  std::string tell_progress(int r) const;
  bool is_gone(int r, Watchdog::Fate* fate) const;
  void check_orders(const Call& call);
  [[noreturn]] void report_mismatch(Call& call);
  void tell_site(const Call& call);
  std::string tell_rank(int r) const;
  /// Writes the failure unless there is one, and throws what it says.
  [[noreturn]] void die(const Call& call, const std::string& text, std::vector<int> ranks,
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
  // Collectives begun: their number, unless they are parts of others, which have the same number.
  uint64_t turn_ = 0;
  std::atomic<uint64_t> awaited_{0};  // the phase that it dozes for
  StageTuner tuner_;
  PlaceTuner places_;
  // How this call is staged: in areas that go round, else past the caches.
  bool swaps_ = false, past_caches_ = false;
  bool trial_ = false;  // this call is timed, so its ranks do not wait for each other's leisure
  bool urges_ = false;  // a thread has been held up by this call for long: peers should not doze
  mutable std::atomic<int> cpus_a_rank_{-1};  // -1: not known yet
  std::atomic<uint32_t> nudges_{0};

  std::mutex pool_mutex_;
  Ref<Pool> pool_;                         // null until something is allocated in it
  bool no_pool_ = false;                   // the system gave none, which has been said
  std::atomic<Pool*> published_{nullptr};  // the same, once its door is written
  std::vector<Entry> entries_;             // of every rank for the call under way
  std::vector<std::byte*> bases_;          // of every rank's pool, here; null between threads
  std::vector<PoolView> views_;
  std::vector<uint8_t> met_;  // 1: everybody has tried to map this rank's pool
  bool unreachable_ = false;  // some rank cannot map another's pool
};

}  // namespace tessera::detail
