// Instances of kernels that draw, count and update; see random.h.
#include "core/backend/cuda/kernels/random.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::cuda {
namespace {

Instance by_type(const char* family, DType t) {
  return {fmt::format("{}_{}", family, name_of(t)), {{"T", std::string(element_type(name_of(t)))}}};
}

// The number of elements where positions follow one another in the whole tensor, else 0.
int64_t dense_count(std::span<const int64_t> extents, std::span<const int64_t> strides) {
  int64_t count = 1;
  for (size_t d = extents.size(); d-- > 0;) {
    if (extents[d] != 1 && strides[d] != count) return 0;
    count *= extents[d];
  }
  return count;
}

}  // namespace

int draw_width(std::string_view kind, DType dtype) {
  const int bytes = int(size_of(dtype));
  return kind == "randint" || bytes > 4 ? 1 : 16 / bytes;
}

DrawPlaces draw_places(std::span<const int64_t> extents, std::span<const int64_t> strides,
                       int64_t first, int width, bool open) {
  const Strided whole[] = {{nullptr, 1, strides}};
  if (width > 1 && first % width == 0) {
    std::vector<WalkPiece> pieces = make_walks(extents, whole, width);
    if (!pieces.empty()) return {width, std::move(pieces)};
    if (const int64_t count = open ? dense_count(extents, strides) : 0; count > 0) {
      const int64_t rounded = (count + width - 1) / width * width, one = 1;
      const Strided line[] = {{nullptr, 1, {&one, 1}}};
      return {width, make_walks({&rounded, 1}, line, width)};
    }
  }
  return {1, make_walks(extents, whole)};
}

Geometry draw_geometry(int64_t count, int width) {
  return cover(count, 256, width > 1 ? kRandomSteps : 1);
}

Instance random_instance(std::string_view kind, DType dtype) {
  return {fmt::format("{}_{}", kind, name_of(dtype)),
          {{"T", std::string(element_type(name_of(dtype)))},
           {"KIND", kind == "rand"    ? "0"
                    : kind == "randn" ? "1"
                                      : "2"}}};
}
Instance dropout_instance(DType dtype) { return by_type("dropout", dtype); }
Instance arange_instance(DType dtype) { return by_type("numbers", dtype); }
Instance update_instance(DType dtype) { return by_type("update", dtype); }

std::vector<UpdatePiece> update_pieces(std::span<const int64_t> counts) {
  std::vector<UpdatePiece> pieces;
  for (size_t i = 0; i < counts.size(); ++i)
    for (int64_t at = 0; at < counts[i]; at += kUpdatePiece)
      pieces.push_back({int(i), unsigned(std::min(kUpdatePiece, counts[i] - at)), at});
  return pieces;
}

}  // namespace tessera::cuda
