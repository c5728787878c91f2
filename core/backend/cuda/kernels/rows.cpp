// How rows are held; see rows.h.
#include "core/backend/cuda/kernels/rows.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::cuda {
namespace {

constexpr RowHold kSingle[] = {{32, 4}, {32, 32}, {256, 32}, {256, 0}};
constexpr RowHold kDouble[] = {{32, 4}, {32, 16}, {256, 16}, {256, 0}};
constexpr int64_t kSumRows = 64;  // of a piece of norm_sums

Instance instance(const char* family, DType dtype, RowHold hold) {
  return {fmt::format("{}_{}_{}x{}", family, name_of(dtype), hold.threads, hold.items),
          {{"T", std::string(element_type(name_of(dtype)))},
           {"THREADS", std::to_string(hold.threads)},
           {"ITEMS", std::to_string(hold.items)}}};
}

}  // namespace

std::span<const RowHold> row_holds(DType dtype) {
  return dtype == kF64 ? std::span<const RowHold>(kDouble) : std::span<const RowHold>(kSingle);
}
RowHold hold_of(DType dtype, int64_t n) {
  const auto holds = row_holds(dtype);
  return *std::find_if(holds.begin(), holds.end(), [&](const RowHold& h) {
    return h.items == 0 || n <= int64_t(h.threads) * h.items;
  });
}

Instance rows_instance(DType dtype, RowHold hold) { return instance("rows", dtype, hold); }
Instance loss_instance(DType dtype, RowHold hold) { return instance("cross_entropy", dtype, hold); }

Geometry rows_geometry(RowHold hold, int64_t rows) {
  const int64_t each = 256 / hold.threads;
  return {{unsigned((rows + each - 1) / each), 1, 1}, {256, 1, 1}, 0};
}
bool rows_in_packs(DType dtype, RowHold hold, int64_t n) {
  return hold.items != 0 && n % std::min(hold.items, 16 / int(size_of(dtype))) == 0;
}

NormSums norm_sums(int64_t rows, int64_t n) {
  int64_t piece = kSumRows;
  while ((rows + piece - 1) / piece > 32768) piece *= 2;
  const int64_t pieces = std::max<int64_t>(1, (rows + piece - 1) / piece);
  return {unsigned(piece),
          unsigned(pieces),
          {{unsigned((n + 31) / 32), unsigned(pieces), 1}, {256, 1, 1}, 0}};
}

}  // namespace tessera::cuda
