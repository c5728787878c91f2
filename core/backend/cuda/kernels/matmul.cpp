// Instances and launches of matrix products; see matmul.h.
#include "core/backend/cuda/kernels/matmul.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr int64_t kMaxBlocks = 65535;  // along y and along z

bool on_units(DType t) { return t == kF16 || t == kBF16; }

// Whether lines of k elements can be copied by 16 bytes.
bool in_packs(const void* data, int64_t along, int64_t across, int64_t k,
              std::span<const int64_t> batch) {
  auto fits = [](int64_t stride) { return stride % 8 == 0; };
  return along == 1 && fits(across) && fits(k) && std::all_of(batch.begin(), batch.end(), fits) &&
         reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

}  // namespace

Instance matmul_instance(DType dtype) {
  return {fmt::format("matmul_{}", name_of(dtype)),
          {{"MATMUL", on_units(dtype) ? "matmul_tensor" : "matmul_scalar"},
           {"T", std::string(element_type(name_of(dtype)))}}};
}

std::vector<MatmulLaunch> matmul_launches(DType dtype, std::span<const int64_t> batch, int64_t m,
                                          int64_t n, int64_t k, const Matrices& c,
                                          const Matrices& a, const Matrices& b, bool accumulate) {
  std::vector<MatmulLaunch> launches;
  if (m == 0 || n == 0) return launches;
  const int bytes = int(size_of(dtype));
  const int64_t tile = on_units(dtype) ? 128 : 64;
  TESSERA_ASSERT(k < int64_t(1) << 31 && n < int64_t(1) << 31, "kernels: a product of {} x {} x {}",
                 m, n, k);
  const Strided operands[] = {
      {c.data, bytes, c.batch}, {a.data, bytes, a.batch}, {b.data, bytes, b.batch}};
  for (const WalkPiece& piece : make_walks(batch, operands))
    for (unsigned first = 0; first < piece.walk.count; first += kMaxBlocks)
      for (int64_t row = 0; row < m; row += kMaxBlocks * tile) {
        const int64_t rows = std::min(kMaxBlocks * tile, m - row);
        auto at = [&](const Matrices& x, int i, int64_t skipped) {
          return static_cast<const char*>(x.data) + (piece.begin[i] + skipped) * bytes;
        };
        MatmulLaunch l{};
        l.call.c = const_cast<char*>(at(c, 0, row * c.row));
        l.call.a = at(a, 1, row * a.row), l.call.b = at(b, 2, 0);
        l.call.result = {c.row, c.column};
        l.call.left = {a.row, a.column};
        l.call.right = {b.row, b.column};
        l.call.m = int(rows), l.call.n = int(n), l.call.k = int(k), l.call.accumulate = accumulate;
        l.call.packs = int(in_packs(l.call.a, a.column, a.row, k, a.batch)) |
                       int(in_packs(l.call.b, b.row, b.column, k, b.batch)) << 1;
        l.call.first = first, l.call.batch = piece.walk;
        l.geometry = {{unsigned((n + tile - 1) / tile), unsigned((rows + tile - 1) / tile),
                       std::min<unsigned>(kMaxBlocks, piece.walk.count - first)},
                      {256, 1, 1},
                      0};
        launches.push_back(l);
      }
  return launches;
}

}  // namespace tessera::cuda
