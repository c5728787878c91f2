#include "core/base/spelling.h"

#include <fmt/core.h>

#include <algorithm>
#include <vector>

namespace tessera {
namespace {

size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    std::swap(before, last), std::swap(last, row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest_word(std::string_view word, std::span<const std::string> known) {
  const std::string* best = nullptr;
  size_t least = word.size() / 3 + 1;
  for (const std::string& k : known)
    if (size_t d = distance(word, k); d < least) best = &k, least = d;
  return best ? *best : std::string();
}

std::string counted(int64_t n, std::string_view noun) {
  return fmt::format("{} {}{}", n, noun, n == 1 ? "" : "s");
}

}  // namespace tessera
