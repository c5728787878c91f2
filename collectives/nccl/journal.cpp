#include "collectives/nccl/journal.h"

#include <algorithm>
#include <cstring>

#include "core/base/error.h"

namespace tessera::nccl {

void Journal::add(const detail::CallRecord& record, const CallSite& site) {
  std::lock_guard lock(mutex_);
  if (entries_.size() == kEntries) entries_.pop_front();
  entries_.emplace_back(record, site);
}

uint64_t Journal::latest() const {
  std::lock_guard lock(mutex_);
  return entries_.empty() ? 0 : entries_.back().first.seq;
}

std::vector<JournalEntry> Journal::entries(size_t most) const {
  std::lock_guard lock(mutex_);
  std::vector<JournalEntry> latest;
  for (auto e = entries_.end() - int64_t(std::min(most, entries_.size())); e != entries_.end(); ++e)
    latest.push_back({e->first, detail::describe(e->second)});
  return latest;
}

// Each entry is the record's bytes, then the site and a zero.
std::string encode(const std::vector<JournalEntry>& entries) {
  std::string text;
  for (const JournalEntry& e : entries) {
    text.append(reinterpret_cast<const char*>(&e.record), sizeof e.record);
    text += e.site;
    text += '\0';
  }
  return text;
}

std::vector<JournalEntry> decode_journal(const std::string& text) {
  std::vector<JournalEntry> entries;
  for (size_t at = 0; at < text.size();) {
    const size_t site = at + sizeof(detail::CallRecord);
    const size_t end = text.find('\0', std::min(site, text.size()));
    TESSERA_CHECK(site <= text.size() && end != text.npos,
                  "a rank's journal of calls ends in an entry; is the store used by two jobs?");
    JournalEntry& e = entries.emplace_back();
    std::memcpy(&e.record, text.data() + at, sizeof e.record);
    e.site = text.substr(site, end - site);
    at = end + 1;
  }
  return entries;
}

std::string compare_journals(const std::vector<std::vector<JournalEntry>>& journals,
                             const std::string& group, std::vector<int>& blame) {
  uint64_t first = 0, last = UINT64_MAX;
  for (const auto& j : journals) {
    if (j.empty()) return "";
    first = std::max(first, j.front().record.seq), last = std::min(last, j.back().record.seq);
  }
  for (uint64_t seq = first; seq <= last; ++seq) {
    std::vector<detail::CallRecord> records;
    std::vector<std::string> sites;
    for (const auto& j : journals) {
      const JournalEntry& e = j[size_t(seq - j.front().record.seq)];
      records.push_back(e.record), sites.push_back(e.site);
    }
    std::string text = detail::compare_calls(records, sites, group, blame);
    if (!text.empty()) return text;
  }
  return "";
}

}  // namespace tessera::nccl
