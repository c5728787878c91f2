// Instances and geometry of scans, windows and batch-norm; see scan.h.
#include "core/backend/cuda/kernels/scan.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr int64_t kShort = 512;      // lines up to which a thread scans alone
constexpr int64_t kNormPiece = 256;  // rows of batch-norm that a block has

Instance by_type(const char* family, DType t) {
  return {fmt::format("{}_{}", family, name_of(t)), {{"T", std::string(element_type(name_of(t)))}}};
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
              {{"SCAN", fmt::format(fmt::runtime(type), element_type(name_of(dtype)))}}};
  throw BugError(fmt::format("kernels: no scan {}", op));
}

ScanLaunch scan_launch(int64_t lines, int64_t n) {
  TESSERA_ASSERT(lines < int64_t(1) << 31 && n < int64_t(1) << 31,
                 "kernels: a scan of {} lines of {}", lines, n);
  if (n <= kShort) return {"lines", {{unsigned((lines + 255) / 256), 1, 1}, {256, 1, 1}, 0}};
  return {"blocks", {{unsigned(lines), 1, 1}, {256, 1, 1}, 0}};
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
