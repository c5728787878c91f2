// The watchdog of a rank keeps all its deadlines and decides which ranks are to blame. Waits of all
// the rank's groups, whatever the backend, are reported to it when they have lasted 100 ms, or
// sooner. Its thread then publishes what this rank waits for (wait_graph.h), looks for ranks that
// have died, logs after 10 s which ranks this rank waits for, and at the deadline ends the wait
// with an error that names the rank to blame. Where that rank waits as well, in whatever group, the
// blame goes on to the rank that it waits for, and so to the end of the chain. Invariant: the first
// failure of a rank is named as the cause of every later failure that it leads to, here and on its
// peers.
#pragma once
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "collectives/store/liveness.h"
#include "collectives/wait_graph.h"
#include "core/base/silence.h"

namespace tessera::detail {

/// Converts an error to a text for other ranks, and back.
std::string encode(const CommError& error);
CommError decode_error(const std::string& text, const std::string& group);

struct WatchedWait;

class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr Millis kCheckInterval{100};  // between two rounds of checks of the waits
  static constexpr Millis kResponseTime{1000};  // for a sign of life, and for the store's answers

  /// A wait. The watchdog's thread calls its functions with its lock held, so that the wait cannot
  /// end meanwhile; they must not block.
  class Wait {
   public:
    virtual ~Wait() = default;
    virtual WaitFacts facts() const = 0;
    /// The time the wait may last. Zero: this wait has no deadline and is neither published nor
    /// logged, because another wait of this rank represents it.
    virtual Millis timeout() const = 0;
    /// What the engine knows of the absent rank `r` of the world: "it last finished #19". "": only
    /// what peers published is known.
    virtual std::string progress_of(int) const { return ""; }
    /// Ends the wait with `error`, or with the error that killed the group before. It may be called
    /// repeatedly.
    virtual void fail(const CommError& error) = 0;
    /// Bytes that have moved to or from the rank that is waited for, for as long as there was a
    /// connection. While the number grows the deadline is put off: a slow link is no death. -1: it
    /// is not known.
    virtual int64_t moved_bytes() const { return -1; }
    /// Lets the wait look for an end that nothing else would show it.
    virtual void probe() {}
    /// The store key of the group's failure; "": the engine itself looks for that, and for deaths
    /// of members.
    virtual std::string failure_key() const { return ""; }
  };
  /// Reports a wait for as long as this object lives.
  class Scope {
   public:
    /// `dog` may be null: the wait is then not watched.
    Scope(Watchdog* dog, Wait& wait, Clock::time_point since);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Watchdog* const dog_;
    std::list<WatchedWait>::iterator entry_;
  };

  /// Makes the watchdog of rank `rank` of the world. `store` is the job's, where deaths are
  /// announced; `prefix` is the prefix of the world's keys; `keeper` is the rank that serves the
  /// store (-1: the launcher does). After `silence` it is logged which ranks this rank waits for.
  Watchdog(int rank, int world_size, std::shared_ptr<Store> store, std::string prefix,
           int keeper = -1, Millis silence = Silence::kFirst);
  ~Watchdog();

  /// See ProcessGroup::working; `group` is the group in which peers may have to wait.
  void working(const std::string& group, std::string_view what);

  /// Notes that a group of this rank has failed with `error`, whose culprits are set if they are
  /// known. Returns true for the first error, which is then to be published. Does not block.
  bool remember_failure(const CommError& error);
  void publish_failure(const CommError& error);
  void failed(const CommError& error) {
    if (remember_failure(error)) publish_failure(error);
  }
  /// The first failure in this process; null: nothing has failed.
  std::optional<CommError> failure() const;
  /// The culprits of the first failure; empty: nothing has failed.
  std::vector<int> culprits() const;

  /// Why a rank of the world ended, as far as is known.
  struct EndReason {
    std::string how;            // "signal 9 (Killed)"; "": not known
    std::vector<int> culprits;  // the rank itself, or those that made it fail
  };
  /// Waits a moment for the launcher's announcement.
  EndReason end_reason_of(int rank);

 private:
  using Entry = WatchedWait;
  struct Late;
  class Inquiry;

  std::list<Entry>::iterator begin(Wait& wait, Clock::time_point since);
  void end(std::list<Entry>::iterator wait);
  void serve();
  bool idle() const { return waits_.empty() && work_.empty(); }
  std::vector<Late> late_waits();
  void check_waits(std::vector<Late>& late);
  void publish_waits(const std::vector<Late>& late);
  void heartbeat();
  void delete_record();
  void check_group_failure(Late& late);
  void check_messages(Late& late);
  void check_deaths(Late& late, const std::vector<DeadRank>& dead);
  void check_deadline(Late& late);
  void check_failure(Late& late, const Verdict& verdict);
  void check_without_store(Late& late);
  void log_wait(const Late& late, const std::vector<int>& absent);
  void deliver(std::vector<Late>& late);
  std::string key(const char* what, int rank) const;
  std::optional<std::string> value_of(const std::string& key) const;
  std::optional<WaitRecord> record_of(int rank);
  std::vector<int> failure_of(int rank) const;

  const int rank_, size_, keeper_;
  const Millis silence_;
  const std::shared_ptr<Store> store_;
  const std::string prefix_;
  const int birth_;  // process generation; see forks()

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Entry> waits_;
  std::map<std::string, std::pair<std::string, Clock::time_point>> work_;  // by group
  std::optional<CommError> failure_;
  Clock::time_point failed_at_;
  uint64_t count_ = 0;
  bool stop_ = false;
  std::thread thread_;

  // Only the watchdog's thread uses the rest.
  bool published_ = false;
  Clock::time_point published_at_{};
  WaitRecord record_;                                  // as published last
  std::optional<Clock::time_point> unanswered_since_;  // the store has not answered since
  std::unique_ptr<Inquiry> inquiry_;                   // exists while a wait is beyond its deadline
  std::map<uint64_t, std::pair<std::string, int>> suspicions_;  // by wait: state, how often seen
};

struct WatchedWait {
  Watchdog::Wait* wait = nullptr;
  uint64_t id = 0;
  Watchdog::Clock::time_point since, logged{};  // `logged`: when it was last logged
  int64_t moved_bytes = -1;                     // as last seen
  Watchdog::Clock::time_point moved{};          // when they were last seen to have grown
};

}  // namespace tessera::detail
