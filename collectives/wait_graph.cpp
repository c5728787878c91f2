#include "collectives/wait_graph.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <span>

#include "collectives/plan.h"

namespace tessera::detail {
namespace {

using Kind = WaitFacts::Kind;

// A record consists of lines whose fields are separated by tabs. No field contains a tab or a line
// break: names of groups, calls and places come from the library and the compiler.
constexpr char kField = '\t', kLineEnd = '\n';

std::vector<std::string> cut(const std::string& text, char at) {
  std::vector<std::string> parts{""};
  for (char c : text)
    if (c == at)
      parts.emplace_back();
    else
      parts.back() += c;
  return parts;
}

int64_t number_in(const std::string& text) {
  int64_t n = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  TESSERA_CHECK(
      error == std::errc() && end == text.data() + text.size() && !text.empty(),
      "a rank's record holds \"{}\" where a number belongs; is the store used by two jobs?",
      text.substr(0, 50));
  return n;
}

std::vector<int> ranks_in(const std::string& text) {
  std::vector<int> ranks;
  if (text.empty()) return ranks;
  for (const std::string& part : cut(text, ',')) ranks.push_back(int(number_in(part)));
  return ranks;
}

std::string plain(std::string text) {
  std::ranges::replace_if(
      text, [](char c) { return c == kField || c == kLineEnd; }, ' ');
  return text;
}

bool is_message(const WaitFacts& w) { return w.peer >= 0; }

// Follows the waits from rank to rank.
class Search {
 public:
  Search(int me, const WaitFacts& mine, Millis timeout,
         const std::function<Account(int rank)>& account)
      : me_(me), group_(mine.group), timeout_(timeout), account_(account), reached_(mine.number) {
    // What this rank waits for need not be asked.
    Account own;
    own.record.emplace().waits.push_back(mine);
    own.alive = true;
    accounts_[me] = std::move(own);
  }

  Verdict run(const WaitFacts& mine) {
    Verdict v;
    v.absent = absent_of(mine, me_);
    for (int r : v.absent) visit(r, mine, me_);
    v.undecided = undecided_;
    v.culprits = culprits_;
    v.chain = chain_, v.why = why_;
    v.reached = reached_;
    // The ranks wait for each other in a circle, so any of them may be blamed: the nearest are, or,
    // where these are most of the group, the ranks that make the call.
    if (v.culprits.empty()) {
      v.culprits = 2 * v.absent.size() > mine.members.size() && !is_message(mine)
                       ? others_than(v.absent, mine.members)
                       : v.absent;
      if (!circle_.empty()) v.why = "they wait for each other, " + circle_;
    }
    std::ranges::sort(v.culprits);
    const auto twice = std::ranges::unique(v.culprits);
    v.culprits.erase(twice.begin(), twice.end());
    return v;
  }

 private:
  static std::vector<int> others_than(const std::vector<int>& ranks, std::vector<int> of) {
    std::erase_if(of, [&](int r) { return std::ranges::find(ranks, r) != ranks.end(); });
    return of;
  }

  const Account& known(int rank) {
    auto [at, fresh] = accounts_.try_emplace(rank);
    if (fresh) at->second = account_(rank);
    if (!at->second.alive) undecided_ = true;
    return at->second;
  }

  bool in_call(int rank, const WaitFacts& w) {
    const Account& a = known(rank);
    if (!a.record || !a.alive.value_or(true)) return false;
    return std::ranges::any_of(a.record->waits, [&](const WaitFacts& theirs) {
      return theirs.group == w.group && theirs.kind == w.kind && theirs.number >= w.number;
    });
  }

  std::vector<int> absent_of(const WaitFacts& w, int who) {
    if (w.absent) return *w.absent;
    if (is_message(w)) return {w.peer};
    std::vector<int> absent;
    for (int r : w.members)
      if (r != who && !in_call(r, w)) absent.push_back(r);
    if (absent.empty() && w.awaited >= 0) absent.push_back(w.awaited);
    return absent;
  }

  // Blames `rank`, which `waiter` waits for in `by`.
  void blame(int rank, const WaitFacts& by, int waiter, const std::string& why) {
    culprits_.push_back(rank);
    if (!why.empty()) why_ += fmt::format("{}world rank {}{}", why_.empty() ? "" : "; ", rank, why);
    if (waiter != me_)
      chain_ += fmt::format("{}world rank {} waits in {} for world rank {}",
                            chain_.empty() ? "" : "; ", waiter, by.title(), rank);
  }

  // Blames a rank that waits for no other, perhaps because it has failed already.
  void blame_idle(int rank, std::span<const int> failed_on, const WaitFacts& by, int waiter) {
    if (failed_on.empty()) return blame(rank, by, waiter, "");
    for (int c : failed_on) {
      if (c == rank) {
        blame(rank, by, waiter, " has failed");
        continue;
      }
      culprits_.push_back(c);
      chain_ += fmt::format("{}world rank {} has failed because of world rank {}",
                            chain_.empty() ? "" : "; ", rank, c);
    }
  }

  void judge_work(int rank, const WorkFacts& work, const WaitFacts& by, int waiter) {
    if (Millis(work.idle_ms) < timeout_)
      undecided_ = true;
    else
      blame(rank, by, waiter,
            fmt::format(" is {} and has not got on for {:.3g} s", work.what,
                        double(work.idle_ms) / 1000));
  }

  void visit(int rank, const WaitFacts& by, int waiter) {
    if (rank == me_ && circle_.empty())
      circle_ = fmt::format("world rank {} in {}", waiter, by.title());
    if (rank == me_ || std::ranges::find(visited_, rank) != visited_.end()) return;
    visited_.push_back(rank);
    const Account& a = known(rank);
    if (!a.alive) return;
    if (!a.record) return blame_idle(rank, a.failed_on, by, waiter);
    if (!*a.alive) return blame(rank, by, waiter, " has stopped: it tells nothing any more");
    std::vector<const WaitFacts*> on;
    for (const WaitFacts& w : a.record->waits)
      if (w.group == by.group && (is_message(by) || is_message(w) || w.number <= by.number))
        on.push_back(&w);
    const WorkFacts* work = nullptr;  // that of the group in which the wait is, if there is any
    for (const WorkFacts& w : a.record->work)
      if (!work || w.group == by.group) work = &w;
    if (on.empty() && (!work || work->group != by.group))
      for (const WaitFacts& w : a.record->waits)
        if (w.holds_up) on.push_back(&w);
    if (on.empty()) return work ? judge_work(rank, *work, by, waiter) : blame(rank, by, waiter, "");
    for (const WaitFacts* w : on) {
      if (w->moved_ms_ago >= 0 && Millis(w->moved_ms_ago) < timeout_) {
        undecided_ = true;  // it waits for a slow link, not for a rank
        continue;
      }
      if (w->group == group_ && !is_message(*w)) reached_ = std::min(reached_, w->number);
      for (int next : absent_of(*w, rank)) visit(next, *w, rank);
    }
  }

  const int me_;
  const std::string& group_;  // the group of the wait in question
  const Millis timeout_;
  const std::function<Account(int rank)>& account_;
  std::map<int, Account> accounts_;
  std::vector<int> visited_, culprits_;
  std::string chain_, why_, circle_;
  uint64_t reached_;
  bool undecided_ = false;
};

}  // namespace

HostNames host_names(std::span<const std::string> identities) {
  std::vector<std::string> names;
  std::map<std::string, std::vector<std::string>> boots;  // by name
  for (const std::string& identity : identities) {
    const size_t space = identity.find(' ');
    const std::string name = identity.substr(0, space);
    const std::string boot = identity.substr(0, identity.find(' ', space + 1));
    std::vector<std::string>& same = boots[name];
    const auto at = std::ranges::find(same, boot);
    const auto number = at - same.begin() + 1;
    if (at == same.end()) same.push_back(boot);
    names.push_back(number == 1 ? name : fmt::format("{} ({})", name, number));
  }
  if (std::ranges::all_of(names, [&](const std::string& n) { return n == names[0]; }))
    return nullptr;
  return std::make_shared<const std::vector<std::string>>(std::move(names));
}

std::string WaitFacts::title() const {
  return fmt::format("{} on {}{}", call, group, site.empty() ? "" : fmt::format(" ({})", site));
}

int WaitFacts::number_of(int r) const {
  auto at = std::ranges::find(members, r);
  return at == members.end() ? -1 : first + int(at - members.begin());
}

std::string WaitFacts::name_of_rank(int r) const {
  const int number = number_of(r);
  if (number < 0) return fmt::format("world rank {}", r);
  std::string name = fmt::format("rank {}", number);
  if (number != r) name += fmt::format(" (world rank {})", r);
  if (hosts) name += " on " + (*hosts)[size_t(number - first)];
  return name;
}

std::string WaitFacts::neighbours_of(int r) const {
  const int number = number_of(r);
  if (!hosts || number < 0) return "";
  const std::string& host = (*hosts)[size_t(number - first)];
  std::vector<int> others;
  for (size_t i = 0; i < members.size(); ++i)
    if ((*hosts)[i] == host && members[i] != r) others.push_back(first + int(i));
  if (others.empty()) return "";
  return fmt::format("; {} {} on {} too", join_ranks(others), others.size() == 1 ? "is" : "are",
                     host);
}

std::string encode(const WaitRecord& record) {
  std::string text = std::to_string(record.beat);
  for (const WaitFacts& w : record.waits)
    text += fmt::format("\nwait\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}", int(w.kind),
                        plain(w.group), fmt::join(w.members, ","), w.number, w.peer,
                        int(w.holds_up), plain(w.call), plain(w.site), int(w.absent.has_value()),
                        fmt::join(w.absent.value_or(std::vector<int>()), ","), w.awaited,
                        w.moved_ms_ago);
  for (const WorkFacts& w : record.work)
    text += fmt::format("\nwork\t{}\t{}\t{}", plain(w.group), plain(w.what), w.idle_ms);
  return text;
}

WaitRecord decode_record(const std::string& text) {
  WaitRecord record;
  const std::vector<std::string> lines = cut(text, kLineEnd);
  record.beat = uint64_t(number_in(lines[0]));
  for (size_t i = 1; i < lines.size(); ++i) {
    const std::vector<std::string> f = cut(lines[i], kField);
    if (f[0] == "work" && f.size() == 4) {
      record.work.push_back({.group = f[1], .what = f[2], .idle_ms = number_in(f[3])});
      continue;
    }
    TESSERA_CHECK(f[0] == "wait" && f.size() == 13,
                  "a rank's record holds the line \"{}\"; is the store used by two jobs?",
                  lines[i].substr(0, 100));
    WaitFacts w;
    w.kind = Kind(number_in(f[1]));
    w.group = f[2];
    w.members = ranks_in(f[3]);
    w.number = uint64_t(number_in(f[4]));
    w.peer = int(number_in(f[5]));
    w.holds_up = number_in(f[6]) != 0;
    w.call = f[7], w.site = f[8];
    if (number_in(f[9]) != 0) w.absent = ranks_in(f[10]);
    w.awaited = int(number_in(f[11]));
    w.moved_ms_ago = number_in(f[12]);
    record.waits.push_back(std::move(w));
  }
  return record;
}

Verdict find_culprits(int me, const WaitFacts& mine, Millis timeout,
                      const std::function<Account(int rank)>& account) {
  return Search(me, mine, timeout, account).run(mine);
}

}  // namespace tessera::detail
