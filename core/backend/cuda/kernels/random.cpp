// Instances of kernels that draw, count and update; see random.h.
#include "core/backend/cuda/kernels/random.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::cuda {
namespace {

Instance by_type(const char* family, DType t) {
  return {fmt::format("{}_{}", family, name_of(t)), {{"T", std::string(element_type(name_of(t)))}}};
}

}  // namespace

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
