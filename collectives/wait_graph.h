// Finds the rank to blame when another has waited too long: the one that is waited for, or, where
// that one waits itself, in whatever group, the rank at the end of the chain. Each rank tells in a
// record what it waits for; the search follows the records from rank to rank until one waits for
// nobody. Pure functions of records. Invariant: a rank that waits, and still tells so, is blamed
// only where ranks wait for each other.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "collectives/process_group.h"

namespace tessera::detail {

/// One wait of one rank. Ranks are those of the world unless said otherwise.
struct WaitFacts {
  enum class Kind : uint8_t { kCollective, kSend, kRecv, kMessages, kJoin };
  Kind kind = Kind::kCollective;
  std::string group;         // its name
  std::vector<int> members;  // of the group, by their rank in it
  uint64_t number = 0;       // of the collective; of a message, a count that tells it from others
  int peer = -1;             // of a message
  bool holds_up = true;      // the rank's program waits, or its writer of checkpoints
  std::string call, site;    // "all_reduce #41", "train.cpp:88"
  /// Those who have not come. None: they are the members whose records do not show them in the
  /// call.
  std::optional<std::vector<int>> absent;
  /// Where records show all in the call: the one whose data has not arrived; -1: not known.
  int awaited = -1;

  // What peers are not told.
  int first = 0;         // number of the first member in errors; see Membership::number
  uint64_t seq = 0;      // of the call
  uint64_t entered = 0;  // of a message: the last collective of the group that this rank entered
  bool takes = false;    // of a message

  bool operator==(const WaitFacts&) const = default;
  /// "all_reduce #41 on world (train.cpp:88)".
  std::string title() const;
  /// Rank in the group of the rank of the world `r`, as errors number it; -1: it is no member.
  int number_of(int r) const;
  /// "rank 1 (world rank 3)", or "rank 1" where the two are equal.
  std::string tell(int r) const;
};

/// What a rank is busy with while others may have to wait for it.
struct WorkFacts {
  std::string group, what;  // "writing step 20 of a checkpoint"
  int64_t idle_ms = 0;      // since it last got on
  bool operator==(const WorkFacts&) const = default;
};

/// All that a rank tells while it has waited for some time, or works.
struct WaitRecord {
  uint64_t beat = 0;  // grows while the rank runs
  std::vector<WaitFacts> waits;
  std::vector<WorkFacts> work;
  bool operator==(const WaitRecord&) const = default;
};
std::string encode(const WaitRecord& record);
/// Throws UserError when the text is no record.
WaitRecord decode_record(const std::string& text);

/// What is known of a rank.
struct Account {
  std::optional<WaitRecord> record;  // none: the rank tells nothing, so it waits for nobody
  /// Whether the rank has told something since the question arose. None: too early to say.
  std::optional<bool> alive;
  std::vector<int> failed_on;  // whom its first failure comes down to; empty: it has not failed
};

struct Verdict {
  bool undecided = false;     // ask again in a moment
  std::vector<int> absent;    // those whom the wait is for
  std::vector<int> culprits;  // those whom that comes down to
  std::string chain;          // where they are others: how that is; "" otherwise
  std::string why;            // what is known of a culprit but that it waits for nobody
  uint64_t reached = 0;       // of the group's collectives, the earliest that one waits in
};

/// Of the wait `mine` of rank `me`, which has lasted until its deadline; `timeout` is how long a
/// rank that works may stand still. `account` is asked for each rank on the way at most once.
Verdict find_culprits(int me, const WaitFacts& mine, Millis timeout,
                      const std::function<Account(int rank)>& account);

}  // namespace tessera::detail
