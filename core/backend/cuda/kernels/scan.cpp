// Instances and geometry of scans, windows and batch-norm; see scan.h.
#include "core/backend/cuda/kernels/scan.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr int64_t kShort = 512;       // lines up to which a thread scans alone
constexpr int64_t kManyLines = 1024;  // lines that keep a card busy by a warp each
constexpr int64_t kNormPiece = 256;   // rows of batch-norm that a block has

Instance by_type(const char* family, DType t) {
  return {fmt::format("{}_{}", family, name_of(t)), {{"T", std::string(element_type(name_of(t)))}}};
}

// Whether a warp may hold a tile of such states, whose joins are short.
bool held_by_warp(std::string_view op, DType t) {
  return (op == "cumsum" || op == "cumprod") && is_floating(t) && t != kF64;
}

}  // namespace

Instance scan_instance(std::string_view op, DType dtype) {
  constexpr std::string_view kScans[][2] = {
      {"cumsum", "ScanJoin<{}, Sum>"},          {"cumprod", "ScanJoin<{}, Prod>"},
      {"logcumsumexp", "ScanJoin<{}, LogSum>"}, {"cummax", "ScanExtreme<{}, true>"},
      {"cummin", "ScanExtreme<{}, false>"},     {"linear_scan", "ScanLinear<{}>"}};
  for (const auto& [name, type] : kScans)
    if (name == op)
      return {fmt::format("{}_{}", op, name_of(dtype)),
              {{"SCAN", fmt::format(fmt::runtime(type), element_type(name_of(dtype)))},
               {"HELD", held_by_warp(op, dtype) ? "true" : "false"}}};
  throw BugError(fmt::format("kernels: no scan {}", op));
}

ScanLaunch scan_launch(std::string_view op, DType dtype, ScanCall& call) {
  const int64_t lines = int64_t(call.outer) * call.inner, n = call.n;
  TESSERA_ASSERT(lines < int64_t(1) << 31 && n < int64_t(1) << 31,
                 "kernels: a scan of {} lines of {}", lines, n);
  const auto in_blocks = [](int64_t count) {
    return Geometry{{unsigned(count), 1, 1}, {256, 1, 1}, 0};
  };
  if (n <= kShort) return {"lines", in_blocks((lines + 255) / 256)};
  if (lines < kManyLines || call.inner != 1 || !held_by_warp(op, dtype))
    return {"blocks", in_blocks(lines)};
  const auto bytes = uintptr_t(kScanItems) * size_of(dtype);
  call.packs = n % kScanItems == 0 && reinterpret_cast<uintptr_t>(call.in) % bytes == 0 &&
               reinterpret_cast<uintptr_t>(call.out) % bytes == 0;
  return {"warps", in_blocks((lines + 7) / 8)};
}

Instance pool_instance(DType dtype) { return by_type("pool", dtype); }
Instance conv_instance(DType dtype) { return by_type("conv", dtype); }
Instance batch_norm_instance(DType dtype) { return by_type("batch_norm", dtype); }

BatchNormPieces batch_norm_pieces(int64_t rows, int64_t channels) {
  int64_t piece = kNormPiece;
  while ((rows + piece - 1) / piece > 32768) piece *= 2;
  const int64_t pieces = std::max<int64_t>(1, (rows + piece - 1) / piece);
  return {unsigned(piece),
          unsigned(pieces),
          {{unsigned((channels + 31) / 32), unsigned(pieces), 1}, {256, 1, 1}, 0}};
}

}  // namespace tessera::cuda
