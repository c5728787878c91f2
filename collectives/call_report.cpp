// The error texts for calls of several ranks that do not match.
#include <fmt/format.h>

#include <algorithm>

#include "collectives/plan.h"

namespace tessera::detail {
namespace {

bool same_call(const CallRecord& a, const CallRecord& b) { return a.fingerprint == b.fingerprint; }

/// "all_reduce(avg, 12 elements of f32)".
std::string describe(const CallRecord& r) {
  std::string text(name_of(r.kind));
  if (r.kind == CollKind::kBarrier) return text;
  text += "(";
  if (traits(r.kind).reduces) text += fmt::format("{}, ", name_of(r.op));
  if (r.peer >= 0) text += fmt::format("root {}, ", r.peer);
  if (r.form)
    text += r.counts ? fmt::format("uneven counts #{:08x}, ", uint32_t(r.counts)) : "uneven, ";
  else
    text += fmt::format("{} elements of ", r.counts);
  return text + fmt::format("{})", name_of(r.dtype));
}

std::string differences(const CallRecord& a, const CallRecord& b) {
  std::vector<std::string_view> what;
  if (a.kind != b.kind) what.push_back("kind");
  if (a.op != b.op) what.push_back("operator");
  if (a.dtype != b.dtype) what.push_back("dtype");
  if (a.counts != b.counts || a.form != b.form) what.push_back("count");
  if (a.peer != b.peer) what.push_back("root");
  if (a.seq != b.seq) what.push_back("sequence number");
  if (a.site != b.site) what.push_back("call site");
  return fmt::format("{}", fmt::join(what, ", "));
}

}  // namespace

std::string join_ranks(std::span<const int> ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

std::string describe(const CallSite& site) {
  std::string_view file = site.file_name();
  file.remove_prefix(std::min(file.size(), file.rfind('/') + 1));
  return fmt::format("{}:{}", file, site.line());
}

std::string compare_calls(std::span<const CallRecord> records, std::span<const std::string> sites,
                          const std::string& group, std::vector<int>& blame) {
  std::vector<std::vector<int>> classes;  // ranks with equal calls, by lowest rank
  for (int r = 0; r < int(records.size()); ++r) {
    auto same = std::find_if(classes.begin(), classes.end(), [&](const auto& c) {
      return same_call(records[size_t(c[0])], records[size_t(r)]);
    });
    if (same == classes.end())
      classes.push_back({r});
    else
      same->push_back(r);
  }
  if (classes.size() <= 1) return "";
  auto majority =
      std::max_element(classes.begin(), classes.end(),
                       [](const auto& a, const auto& b) { return a.size() < b.size(); });
  const CallRecord& usual = records[size_t((*majority)[0])];
  std::string text = fmt::format("{} #{} on {}: ranks made different calls:", name_of(usual.kind),
                                 usual.seq, group);
  std::string why;
  bool only_sites = true;
  for (const auto& c : classes) {
    const CallRecord& r = records[size_t(c[0])];
    text += fmt::format(" {} called {} at {};", join_ranks(c), describe(r), sites[size_t(c[0])]);
    if (&c == &*majority) continue;
    std::string differ = differences(usual, r);
    only_sites &= differ == "call site";
    why += fmt::format("{}{}", why.empty() ? "" : "; ", differ);
    blame.insert(blame.end(), c.begin(), c.end());
  }
  return text + fmt::format(" they differ in {}; {}", why,
                            only_sites ? "let all ranks share one line, or pass `site`"
                                       : "make the same call on every rank");
}

std::string compare_splits(std::span<const int64_t> splits, int size, const std::string& head,
                           std::vector<int>& blame) {
  for (int from = 0; from < size; ++from)
    for (int to = 0; to < size; ++to) {
      int64_t sent = splits[size_t(from * 2 * size + to)];
      int64_t expected = splits[size_t(to * 2 * size + size + from)];
      if (sent == expected) continue;
      blame = {from, to};
      return fmt::format(
          "{}: rank {} sends {} bytes to rank {}, which expects {}; make in_splits and out_splits "
          "agree",
          head, from, sent, to, expected);
    }
  return "";
}

}  // namespace tessera::detail
