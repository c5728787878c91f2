// The one owner of deadlines and blame of a rank: waits of all its groups, whatever the backend,
// are reported here, at the latest once they have lasted 100 ms. A thread then tells the peers what
// this rank waits for (wait_graph.h), looks for ranks that have died, says after 10 s for whom this
// rank waits, and at the deadline ends the wait with an error that names the culprit: the rank at
// the end of the chain of ranks that wait for another, in whatever groups. Invariant: the first
// failure of a rank is what everything that fails on it later comes down to, here and on its peers.
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

/// The text of an error for other ranks, and back.
std::string encode(const CommError& error);
CommError decode_error(const std::string& text, const std::string& group);

struct WatchedWait;

class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr Millis kLook{100};       // between two looks at what is under way
  static constexpr Millis kPatience{1000};  // for a sign of life, and for the store's answers

  /// One wait. Its members are called by the watchdog's thread with its lock held, so that the wait
  /// cannot end meanwhile; they do not block.
  class Wait {
   public:
    virtual ~Wait() = default;
    virtual WaitFacts facts() const = 0;
    /// Zero: another wait of this rank stands for this one, which has no deadline and is neither
    /// told to peers nor spoken of.
    virtual Millis timeout() const = 0;
    /// What the engine knows of the rank of the world `r`, which has not come: "it last finished
    /// #19". "": nothing but what peers tell.
    virtual std::string story(int) const { return ""; }
    /// Ends the wait with `error`, or with what had killed the group before. May be called
    /// repeatedly.
    virtual void fail(const CommError& error) = 0;
    /// Ends the wait where nothing else would.
    virtual void probe() {}
    /// Where the store holds what the group died of; "": the engine looks for that, and for deaths
    /// of its members, itself.
    virtual std::string failure_key() const { return ""; }
  };
  /// A wait that is under way for as long as this lives.
  class Scope {
   public:
    /// `dog` may be null: nobody looks at the wait.
    Scope(Watchdog* dog, Wait& wait, Clock::time_point since);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Watchdog* const dog_;
    std::list<WatchedWait>::iterator entry_;
  };

  /// Of rank `rank` of the world. `store` is the job's, where deaths are announced; `prefix` is
  /// that of the world's keys; `keeper` is the rank that serves the store, -1: the launcher does.
  /// After `silence` it is said for whom this rank waits.
  Watchdog(int rank, int world_size, std::shared_ptr<Store> store, std::string prefix,
           int keeper = -1, Millis silence = Silence::kFirst);
  ~Watchdog();

  /// This rank is at work in `group` for which its peers may have to wait: their deadlines begin
  /// anew with each call. An empty text ends it.
  void working(const std::string& group, std::string_view what);

  /// A group of this rank has failed with `error`, whose culprits are known where they can be. True
  /// for the first such error, which is then to be told to the peers. Does not block.
  bool remember_failure(const CommError& error);
  void tell_failure(const CommError& error);
  void failed(const CommError& error) {
    if (remember_failure(error)) tell_failure(error);
  }
  /// What the first failure came down to; empty: nothing has failed.
  std::vector<int> culprits() const;

  /// Why a rank of the world is gone, as far as anybody has said.
  struct Fate {
    std::string how;            // "signal 9 (Killed)"; "": nobody has said
    std::vector<int> culprits;  // the rank itself, or those that it had failed on
  };
  /// Waits a moment for the launcher's word.
  Fate fate_of(int rank);

 private:
  using Entry = WatchedWait;
  struct Late;
  class Inquiry;

  std::list<Entry>::iterator begin(Wait& wait, Clock::time_point since);
  void end(std::list<Entry>::iterator wait);
  void serve();
  bool idle() const { return waits_.empty() && work_.empty(); }
  std::vector<Late> late_waits();
  void look(std::vector<Late>& late);
  void tell(const std::vector<Late>& late);
  void beat();
  void forget();
  void check_obituary(Late& late);
  void check_messages(Late& late);
  void check_deaths(Late& late, const std::vector<DeadRank>& dead);
  void check_deadline(Late& late);
  void check_failure(Late& late, const Verdict& verdict);
  void check_alone(Late& late);
  void say(const Late& late, const std::vector<int>& absent);
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

  // Of the thread.
  bool told_ = false;
  Clock::time_point told_at_{};
  WaitRecord record_;                 // as told last
  int silent_looks_ = 0;              // in a row, in which the store did not answer
  std::unique_ptr<Inquiry> inquiry_;  // while a wait is beyond its deadline
  std::map<uint64_t, std::pair<std::string, int>> suspicions_;  // by wait: state, how often seen
};

struct WatchedWait {
  Watchdog::Wait* wait = nullptr;
  uint64_t id = 0;
  Watchdog::Clock::time_point since, said{};  // said for whom it waits
};

}  // namespace tessera::detail
