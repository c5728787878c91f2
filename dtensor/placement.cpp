#include "dtensor/placement.h"

#include <optional>

namespace tessera {
namespace {

// Returns nothing when the layout does not fit; `why` then says so.
std::optional<Box> try_box(const Shape& global, const Layout& layout, const Coordinates& sizes,
                           const Coordinates& coordinate, std::string* why) {
  Box box;
  for (int64_t e : global) box.push_back({0, e, e});
  for (size_t a = layout.size(); a-- > 0;) {
    const Placement& p = layout[a];
    if (!p.is_shard()) continue;
    if (p.dim < 0 || p.dim >= global.size() || p.unit < 1) {
      if (why) *why = fmt::format("{} of a tensor with {} dims", to_string(p), global.size());
      return {};
    }
    Range& r = box[size_t(p.dim)];
    if (r.size % p.unit != 0) {
      if (why)
        *why = fmt::format(
            "mesh axis {} finds {} elements of dim {} and cannot cut them in units of {}", a,
            r.size, p.dim, p.unit);
      return {};
    }
    r = cut(r, p.unit, sizes[a], coordinate[a]);
  }
  return box;
}

}  // namespace

std::string to_string(const Placement& p) {
  if (p.is_replicate()) return "Replicate";
  if (p.is_partial()) return fmt::format("Partial({})", name_of(p.op));
  return p.unit == 1 ? fmt::format("Shard({})", p.dim)
                     : fmt::format("Shard({}, unit {})", p.dim, p.unit);
}

std::string to_string(const Layout& layout) {
  std::string text;
  for (const Placement& p : layout) text += (text.empty() ? "" : ", ") + to_string(p);
  return "(" + text + ")";
}

Shape shape_of(const Box& box) {
  Shape s;
  for (const Range& r : box) s.push_back(r.size);
  return s;
}

Box box_of(const Shape& global, const Layout& layout, const Coordinates& sizes,
           const Coordinates& coordinate) {
  std::string why;
  std::optional<Box> box = try_box(global, layout, sizes, coordinate, &why);
  TESSERA_CHECK_AS(ShardingError, box, "sharding: {} does not fit {}: {}", to_string(layout),
                   to_string(global), why);
  return *std::move(box);
}

bool for_all_ranks(const Coordinates& sizes, FunctionRef<bool(const Coordinates&)> f) {
  Coordinates c(sizes.size(), 0);
  for (;;) {
    if (!f(c)) return false;
    size_t a = sizes.size();
    while (a > 0 && ++c[a - 1] == sizes[a - 1]) c[--a] = 0;
    if (a == 0) return true;
  }
}

// Whether a layout fits, and the boxes, depend only on the axes that cut: coordinates on the others
// stay 0.
bool fits(const Shape& global, const Layout& layout, const Coordinates& sizes) {
  Coordinates cutting = sizes;
  for (size_t a = 0; a < layout.size(); ++a)
    if (!layout[a].is_shard()) cutting[a] = 1;
  return for_all_ranks(cutting, [&](const Coordinates& c) {
    return try_box(global, layout, sizes, c, nullptr).has_value();
  });
}

bool same_boxes(const Shape& global, const Layout& a, const Layout& b, const Coordinates& sizes) {
  if (a == b) return fits(global, a, sizes);
  return for_all_ranks(sizes, [&](const Coordinates& c) {
    auto x = try_box(global, a, sizes, c, nullptr), y = try_box(global, b, sizes, c, nullptr);
    return x && y && *x == *y;
  });
}

}  // namespace tessera
