// Arithmetic of extents that a caller may choose freely. A result beyond 64 bits is an error that
// names the op, since a product that wrapped could pass the checks that keep views inside their
// memory.
#pragma once
#include <string_view>

#include "core/base/error.h"

namespace tessera {

/// a b and a + b; throw ShapeError naming `op` where 64 bits do not hold them.
inline int64_t extent_product(int64_t a, int64_t b, std::string_view op) {
  int64_t n;
  TESSERA_CHECK_AS(ShapeError, !__builtin_mul_overflow(a, b, &n),
                   "{}: an extent of {} times {} does not fit any memory", op, a, b);
  return n;
}
inline int64_t extent_sum(int64_t a, int64_t b, std::string_view op) {
  int64_t n;
  TESSERA_CHECK_AS(ShapeError, !__builtin_add_overflow(a, b, &n),
                   "{}: an extent of {} plus {} does not fit any memory", op, a, b);
  return n;
}

/// True when the `size` places begin, begin + step, .. lie in a dim of that extent.
constexpr bool steps_fit(int64_t begin, int64_t size, int64_t step, int64_t extent) {
  if (begin < 0 || size < 0 || step < 1 || begin > extent) return false;
  const int64_t room = extent - 1 - begin;
  return size == 0 || (room >= 0 && size - 1 <= (step == 1 ? room : room / step));
}

}  // namespace tessera
