// Finds the rank to blame when another has waited too long: the rank that is waited for, or, if
// that one waits too, in whatever group, the rank at the end of the chain. Each rank publishes in a
// record what it waits for; the search follows the records until it finds a rank that waits for no
// other. These are pure functions of records. Invariant: a rank that waits, and still says so, is
// blamed only where ranks wait in a circle.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/host_names.h"
#include "collectives/process_group.h"

namespace tessera::detail {

/// One wait of one rank. Ranks are numbers in the world unless said otherwise.
struct WaitFacts {
  enum class Kind : uint8_t { kCollective, kSend, kRecv, kMessages, kJoin };
  Kind kind = Kind::kCollective;
  std::string group;         // its name
  std::vector<int> members;  // of the group, by their rank in it
  uint64_t number = 0;       // of the collective; for a message, a count that identifies it
  int peer = -1;             // for a message: the other rank
  bool holds_up = true;      // a thread is blocked by it: the program or the checkpoint writer
  std::string call, site;    // "all_reduce #41", "train.cpp:88"
  /// The members that have not made the call. Unset: the members whose records do not show them in
  /// it.
  std::optional<std::vector<int>> absent;
  /// If records show all members in the call: the rank whose data has not arrived; -1: not known.
  int awaited = -1;
  int64_t moved_ms_ago = -1;  // when bytes last moved for it; -1: it is not known

  // The rest is not sent to peers.
  HostNames hosts = nullptr;  // of the members; null where all are on one
  int first = 0;              // number of the first member in errors; see Membership::number
  uint64_t seq = 0;           // of the call
  uint64_t entered = 0;  // for a message: the last collective of the group that this rank entered
  bool takes = false;    // for a message: this rank receives

  bool operator==(const WaitFacts&) const = default;
  /// "all_reduce #41 on world (train.cpp:88)".
  std::string title() const;
  /// The number in errors of the rank of the world `r`, by its rank in the group; -1: it is no
  /// member.
  int number_of(int r) const;
  /// "rank 1 (world rank 3)", or "rank 1" where the two are equal; with " on node1" where members
  /// are on several hosts.
  std::string name_of_rank(int r) const;
  /// "; rank 2 is on node1 too": the other members on the host of `r`, which may have gone with it.
  /// "" where there are none, or all members are on one host.
  std::string neighbours_of(int r) const;
};

/// What a rank is busy with while others may have to wait for it; see ProcessGroup::working.
struct WorkFacts {
  std::string group, what;  // "writing step 20 of a checkpoint"
  int64_t idle_ms = 0;      // since it last made progress
  bool operator==(const WorkFacts&) const = default;
};

/// What a rank publishes while it has waited for some time, or is busy.
struct WaitRecord {
  uint64_t beat = 0;  // grows while the rank runs
  std::vector<WaitFacts> waits;
  std::vector<WorkFacts> work;
  bool operator==(const WaitRecord&) const = default;
};
std::string encode(const WaitRecord& record);
/// Throws UserError when the text is not a record.
WaitRecord decode_record(const std::string& text);

/// What is known of a rank.
struct Account {
  std::optional<WaitRecord> record;  // unset: the rank publishes nothing, so it waits for no other
  /// Whether the rank has published something since it was first asked about. Unset: it is too
  /// early to say.
  std::optional<bool> alive;
  std::vector<int> failed_on;  // ranks that caused its first failure; empty: it has not failed
};

struct Verdict {
  bool undecided = false;     // ask again in a moment
  std::vector<int> absent;    // ranks that the wait is for
  std::vector<int> culprits;  // ranks that are to blame for it
  std::string chain;          // how the wait leads to the culprits, if they are others; else ""
  std::string why;            // what else is known of a culprit
  uint64_t reached = 0;       // the earliest of the group's collectives that a rank waits in
};

/// Finds the ranks to blame for the wait `mine` of rank `me`, which has lasted until its deadline.
/// A busy rank may be without progress for `timeout`, and so may a rank whose data still moves.
/// Calls `account` for each rank on the way at most once.
Verdict find_culprits(int me, const WaitFacts& mine, Millis timeout,
                      const std::function<Account(int rank)>& account);

}  // namespace tessera::detail
