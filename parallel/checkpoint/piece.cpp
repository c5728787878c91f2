#include "parallel/checkpoint/piece.h"

#include <algorithm>

namespace tessera::checkpoint {
namespace {

// Boxes that no straight cut separates are compared in pairs; this limits their number.
constexpr size_t kMaxInterlocked = 2048;
constexpr int kMaxCuts = 64;  // largest depth of nested cuts

int64_t end_of(const Box& b, int d) { return b.begin[d] + b.shape[d]; }

Box range_of(Box region, int d, int64_t begin, int64_t end) {
  region.begin[d] = begin;
  region.shape[d] = end - begin;
  return region;
}

std::optional<std::string> compare_pairs(const Box& region, std::span<const Box> boxes) {
  if (boxes.size() > kMaxInterlocked)
    return fmt::format("{} boxes interlock in {}, too many to compare", boxes.size(),
                       to_string(region));
  int64_t volume = 0;
  for (size_t i = 0; i < boxes.size(); ++i) {
    volume += numel(boxes[i].shape);
    for (size_t j = 0; j < i; ++j)
      if (auto both = intersect(boxes[j], boxes[i]))
        return fmt::format("the boxes {} and {} overlap in {}", to_string(boxes[j]),
                           to_string(boxes[i]), to_string(*both));
  }
  if (volume == numel(region.shape)) return std::nullopt;
  return fmt::format("{} of {} elements of {} are in no box", numel(region.shape) - volume,
                     numel(region.shape), to_string(region));
}

// Cuts the region into slabs wherever no box crosses the cut, dim by dim, and then each slab in the
// same way. Real layouts are separated into single boxes, with n log n instead of n^2 comparisons.
std::optional<std::string> check(const Box& region, std::span<Box> boxes, int depth) {
  for (int d = 0; d < region.begin.size(); ++d) {
    std::ranges::sort(boxes, {}, [d](const Box& b) { return b.begin[d]; });
    std::vector<std::pair<size_t, int64_t>> slabs;  // first box after the slab, where the slab ends
    int64_t end = region.begin[d];
    for (size_t i = 0; i < boxes.size(); ++i) {
      int64_t begin = boxes[i].begin[d];
      if (begin > end)
        return fmt::format("no box holds {}", to_string(range_of(region, d, end, begin)));
      if (begin == end && i > 0) slabs.emplace_back(i, end);
      end = std::max(end, end_of(boxes[i], d));
    }
    if (end < end_of(region, d))
      return fmt::format("no box holds {}", to_string(range_of(region, d, end, end_of(region, d))));
    if (slabs.empty()) continue;
    if (depth == kMaxCuts) break;
    slabs.emplace_back(boxes.size(), end);
    size_t first = 0;
    int64_t begin = region.begin[d];
    for (auto [next, slab_end] : slabs) {
      if (auto error = check(range_of(region, d, begin, slab_end),
                             boxes.subspan(first, next - first), depth + 1))
        return error;
      first = next, begin = slab_end;
    }
    return std::nullopt;
  }
  return boxes.size() == 1 ? std::nullopt : compare_pairs(region, boxes);
}

}  // namespace

Piece whole(std::string name, Tensor values) {
  Shape shape = values.shape();
  return {std::move(name), shape, Dims::filled(shape.size(), 0), std::move(values)};
}

std::string to_string(const Box& box) {
  std::string out;
  // The end of a box from a damaged file may exceed int64_t.
  for (int d = 0; d < box.begin.size(); ++d)
    out += fmt::format("{}{}:{}", d ? ", " : "", box.begin[d],
                       uint64_t(box.begin[d]) + uint64_t(box.shape[d]));
  return "[" + out + "]";
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  Box out;
  for (int d = 0; d < a.begin.size(); ++d) {
    int64_t begin = std::max(a.begin[d], b.begin[d]), end = std::min(end_of(a, d), end_of(b, d));
    if (begin >= end) return std::nullopt;
    out.begin.push_back(begin);
    out.shape.push_back(end - begin);
  }
  return out;
}

bool inside(const Box& box, const Shape& whole) {
  if (box.begin.size() != whole.size() || box.shape.size() != whole.size()) return false;
  for (int d = 0; d < whole.size(); ++d)
    if (box.begin[d] < 0 || box.shape[d] < 0 || box.begin[d] > whole[d] ||
        box.shape[d] > whole[d] - box.begin[d])
      return false;
  return true;
}

std::optional<std::string> partition_error(const Shape& whole, std::vector<Box> boxes) {
  Box all{Dims::filled(whole.size(), 0), whole};
  if (numel(whole) == 0) return std::nullopt;
  if (boxes.empty()) return fmt::format("no box holds {}", to_string(all));
  return check(all, boxes, 0);
}

bool matches(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0, star = std::string_view::npos, resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++, resume = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p, ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1, t = ++resume;  // the last star matches one more character
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace tessera::checkpoint
