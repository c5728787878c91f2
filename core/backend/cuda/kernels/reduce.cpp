// Instances and launches of reductions; see reduce.h. Pieces depend on n alone, so a row is summed
// in the same order however many rows there are.
#include "core/backend/cuda/kernels/reduce.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr int64_t kRowPiece = 16384, kColumnPiece = 256, kWarpRow = 1024, kMaxPieces = 32768;

std::string_view join_type(std::string_view join) {
  constexpr std::string_view kJoins[][2] = {{"sum", "Sum"},  {"prod", "Prod"}, {"amax", "Max"},
                                            {"amin", "Min"}, {"any", "Any"},   {"all", "All"}};
  for (const auto& [name, type] : kJoins)
    if (name == join) return type;
  throw BugError(fmt::format("kernels: no join {}", join));
}

ReduceLaunch launch(int64_t outer, int64_t n, int64_t inner, DType in, bool aligned) {
  int64_t piece = inner == 1 ? kRowPiece : kColumnPiece;
  while ((n + piece - 1) / piece > kMaxPieces) piece *= 2;
  const int64_t pieces = std::max<int64_t>(1, (n + piece - 1) / piece);
  const int64_t width = std::min<int64_t>(8, 16 / int64_t(size_of(in)));
  ReduceLaunch l{};
  l.call = {nullptr,         nullptr,          unsigned(outer), unsigned(n),
            unsigned(inner), unsigned(pieces), unsigned(piece), aligned && n % width == 0};
  l.partial = outer * pieces * inner;
  if (inner == 1 && n <= kWarpRow) {
    l.entry = "warps";
    l.geometry = {{unsigned((outer + 7) / 8), 1, 1}, {256, 1, 1}, 0};
  } else if (inner == 1) {
    TESSERA_ASSERT(outer * pieces < int64_t(1) << 31, "kernels: {} pieces of rows", outer * pieces);
    l.entry = "rows";
    l.geometry = {{unsigned(outer * pieces), 1, 1}, {256, 1, 1}, 0};
  } else {
    l.entry = "columns";
    l.geometry = {
        {unsigned((inner + 31) / 32), unsigned(pieces), unsigned(std::min<int64_t>(outer, 65535))},
        {256, 1, 1},
        0};
  }
  return l;
}

}  // namespace

Instance reduce_instance(std::string_view join, DType in, DType out) {
  return {fmt::format("{}_{}_{}", join, name_of(in), name_of(out)),
          {{"JOIN", std::string(join_type(join))},
           {"IN", std::string(element_type(name_of(in)))},
           {"OUT", std::string(element_type(name_of(out)))}}};
}
Instance extreme_instance(bool largest, DType in) {
  return {
      fmt::format("{}_{}", largest ? "argmax" : "argmin", name_of(in)),
      {{"LARGEST", largest ? "true" : "false"}, {"IN", std::string(element_type(name_of(in)))}}};
}

Instance bits_hash_instance(int bytes) {
  return {fmt::format("bits_hash_{}", bytes), {{"T", std::string(bits_type(bytes))}}};
}

std::vector<ReduceLaunch> reduce_launches(int64_t outer, int64_t n, int64_t inner, DType in,
                                          DType partial, bool aligned) {
  std::vector<ReduceLaunch> launches;
  if (outer * inner == 0) return launches;
  launches.push_back(launch(outer, n, inner, in, aligned));
  while (launches.back().call.pieces > 1)
    launches.push_back(launch(outer, launches.back().call.pieces, inner, partial, true));
  return launches;
}

ReduceLaunch extreme_launch(int64_t outer, int64_t n, int64_t inner) {
  TESSERA_ASSERT(outer * inner < int64_t(1) << 31 && n < int64_t(1) << 31,
                 "kernels: argmax of {} lines of {}", outer * inner, n);
  ReduceLaunch l{"positions", {}, {}, outer * inner};
  l.call = {nullptr, nullptr, unsigned(outer), unsigned(n), unsigned(inner), 1, unsigned(n), 0};
  l.geometry = {{unsigned(outer * inner), 1, 1}, {256, 1, 1}, 0};
  return l;
}

}  // namespace tessera::cuda
