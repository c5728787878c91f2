#include "core/ops/reshape_axes.h"

#include <numeric>

namespace tessera {

Shape reshaped(const Shape& from, const Shape& shape) {
  Shape to = shape;
  const int64_t have = numel(from);
  int unknown = -1;
  for (int d = 0; d < to.size(); ++d) {
    TESSERA_CHECK_AS(ShapeError, to[d] >= -1 && (to[d] != -1 || unknown < 0),
                     "reshape: {}; at most one extent may be -1", to_string(shape));
    if (to[d] == -1) unknown = d;
  }
  if (unknown >= 0) {
    to[unknown] = 1;
    const int64_t known = numel(to);
    TESSERA_CHECK_AS(ShapeError, known > 0 && have % known == 0,
                     "reshape: {} elements of {} do not fit {}", have, to_string(from),
                     to_string(shape));
    to[unknown] = have / known;
  }
  TESSERA_CHECK_AS(ShapeError, to == from || numel(to) == have,
                   "reshape: {} elements of {} do not fit {}", have, to_string(from),
                   to_string(shape));
  return to;
}

std::optional<Strides> reshape_strides(const Shape& from, const Strides& strides, const Shape& to) {
  if (numel(from) == 0) return contiguous_strides(to);
  // Runs of dims of `from` that are dense among themselves; each must be cut up by whole dims of
  // `to`.
  Strides result = contiguous_strides(to);
  int j = to.size() - 1;
  for (int i = from.size() - 1; i >= 0;) {
    while (i >= 0 && from[i] == 1) --i;
    if (i < 0) break;
    int64_t base = strides[i], run = from[i];
    int64_t next = strides[i] * from[i];
    --i;
    while (i >= 0 && (from[i] == 1 || strides[i] == next)) {
      if (from[i] != 1) run *= from[i], next *= from[i];
      --i;
    }
    int64_t covered = 1;
    while (j >= 0 && (covered < run || to[j] == 1)) {
      result[j] = base * covered;
      covered *= to[j];
      --j;
    }
    if (covered != run) return std::nullopt;
  }
  return result;
}

namespace {

// Builds the loops of one group of dims that hold the same number of elements in both shapes.
struct Refiner {
  const Shape &from, &to;
  AxisMap map;
  OperandLoops a, b;
  int i = 0, j = 0;                // dims taken so far
  int64_t x = 1, y = 1;            // what is left of dims i - 1 and j - 1
  int64_t left_x = 1, left_y = 1;  // what is left of the group, by each shape

  void take_x() { x = from[i++], left_x *= x; }
  void take_y() { y = to[j++], left_y *= y; }
  void whole_x() { a[size_t(i - 1)].push_back(map.add(Factor::kWhole, x)); }
  void whole_y() { b[size_t(j - 1)].push_back(map.add(Factor::kWhole, y)); }

  void run() {
    for (;;) {
      while (x == 1 && y == 1 && i < from.size() && j < to.size() && from[i] == 1 && to[j] == 1) {
        take_x(), take_y();
        a[size_t(i - 1)].push_back(map.add(Factor::kPass, 1)), b[size_t(j - 1)] = a[size_t(i - 1)];
      }
      while (x == 1 && i < from.size()) take_x();
      while (y == 1 && j < to.size()) take_y();
      if (x == 1 && y == 1) return;
      if (int64_t g = std::gcd(x, y); g > 1) {
        int f = map.add(Factor::kPass, g);
        a[size_t(i - 1)].push_back(f), b[size_t(j - 1)].push_back(f);
        x /= g, y /= g, left_x /= g, left_y /= g;
        continue;
      }
      while (left_x != left_y) {
        if (left_x < left_y) {
          if (x > 1) whole_x();
          take_x();
        } else {
          if (y > 1) whole_y();
          take_y();
        }
      }
      if (x > 1) whole_x();
      if (y > 1) whole_y();
      x = y = left_x = left_y = 1;
    }
  }
};

}  // namespace

AxisMap reshape_axes(const Shape& from, const Shape& to) {
  if (numel(from) == 0) {  // nothing to share: every dim is whole
    AxisMap m;
    OperandLoops a, b;
    for (int64_t e : from) a.push_back(e == 1 ? DimLoops{} : DimLoops{m.add(Factor::kWhole, e)});
    for (int64_t e : to) b.push_back(e == 1 ? DimLoops{} : DimLoops{m.add(Factor::kWhole, e)});
    m.in.push_back(a), m.out.push_back(b);
    return m;
  }
  Refiner r{from, to, {}, OperandLoops(size_t(from.size())), OperandLoops(size_t(to.size()))};
  r.run();
  r.map.in.push_back(r.a);
  r.map.out.push_back(r.b);
  return std::move(r.map);
}

}  // namespace tessera
