#include "collectives/call_order.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "collectives/plan.h"

namespace tessera::detail {
namespace {

uint64_t mix(uint64_t h, uint64_t x) {  // one round of splitmix64
  h += x + 0x9e3779b97f4a7c15ull;
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9ull;
  return h ^ (h >> 27);
}

// The number of calls in prefix number j.
size_t length_of(int j) {
  if (j < 16) return size_t(j) + 1;
  size_t octave = size_t(16) << ((j - 16) / 4);
  return octave + octave / 4 * (size_t(j - 16) % 4 + 1);
}

}  // namespace

OrderDigest digest_of(std::span<const uint64_t> calls) {
  OrderDigest s;
  uint64_t h = 0;
  int j = 0;
  for (size_t i = 0; i < calls.size(); ++i) {
    h = mix(h, calls[i]);
    if (j < OrderDigest::kPrefixes && i + 1 == length_of(j))
      s.prefixes[size_t(j++)] = uint32_t(h >> 16);
  }
  s.whole = std::max<uint64_t>(1, mix(h, calls.size()));
  for (; j < OrderDigest::kPrefixes; ++j) s.prefixes[size_t(j)] = uint32_t(s.whole >> 16);
  return s;
}

std::string compare_orders(std::span<const OrderDigest> digests, const CallOrder& mine, int rank,
                           const std::string& title, std::vector<int>& blame) {
  std::map<uint64_t, std::vector<int>> classes;
  for (int r = 0; r < int(digests.size()); ++r)
    if (digests[size_t(r)].whole) classes[digests[size_t(r)].whole].push_back(r);
  if (classes.size() <= 1) return "";
  auto usual = std::max_element(classes.begin(), classes.end(), [](auto& a, auto& b) {
    return a.second.size() != b.second.size() ? a.second.size() < b.second.size()
                                              : a.second > b.second;
  });
  std::string text = title + ": the steps that ranks run again make different calls:";
  int first = OrderDigest::kPrefixes;
  for (auto& [whole, ranks] : classes) {
    text +=
        fmt::format("{} {}", &ranks == &classes.begin()->second ? "" : " and", join_ranks(ranks));
    if (whole == usual->first) continue;
    blame.insert(blame.end(), ranks.begin(), ranks.end());
    const auto &a = digests[size_t(ranks[0])].prefixes,
               &b = digests[size_t(usual->second[0])].prefixes;
    first = std::min(first, int(std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin()));
  }
  size_t begin = first == 0 ? 0 : length_of(first - 1),
         end = first < OrderDigest::kPrefixes ? length_of(first) : mine.calls.size();
  text += fmt::format(" differ from call {} of the step on; rank {} makes", begin + 1, rank);
  end = std::min(end, mine.names.size());
  if (begin >= end) text += fmt::format(" {} calls in all", mine.names.size());
  for (size_t i = begin; i < end; ++i)
    text += fmt::format("{} {}", i > begin ? "," : "", mine.names[i]);
  return text + ". Give every rank the same program, with arguments of the same types";
}

}  // namespace tessera::detail
