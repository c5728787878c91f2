// The latest collectives of one rank on a group of cards, as other ranks see them: NCCL itself does
// not notice that ranks make different calls, and hangs or gives wrong values. Invariant: entries
// are in the order of their numbers, without gaps.
#pragma once
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/plan.h"

namespace tessera::nccl {

namespace detail = ::tessera::detail;

struct JournalEntry {
  detail::CallRecord record;
  std::string site;  // "train.cpp:88"
};

class Journal {
 public:
  static constexpr size_t kEntries = 1024;  // a captured step may have hundreds of calls
  void add(const detail::CallRecord& record, const CallSite& site);
  /// Number of the latest call.
  uint64_t latest() const;
  /// The latest ones, at most so many.
  std::vector<JournalEntry> entries(size_t most) const;

 private:
  mutable std::mutex mutex_;
  std::deque<std::pair<detail::CallRecord, CallSite>> entries_;
};

std::string encode(const std::vector<JournalEntry>& entries);
std::vector<JournalEntry> decode_journal(const std::string& text);

/// The error text where ranks differ in the first of the calls that all journals (one for each
/// rank) have and that differs; empty where there is none. `blame` gets the ranks outside the
/// majority.
std::string compare_journals(const std::vector<std::vector<JournalEntry>>& journals,
                             const std::string& group, std::vector<int>& blame);

}  // namespace tessera::nccl
