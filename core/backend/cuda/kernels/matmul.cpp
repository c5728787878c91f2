// Instances and launches of matrix products; see matmul.h.
#include "core/backend/cuda/kernels/matmul.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr int64_t kMaxBatch = 65535;  // of the grid's third dim

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
  TESSERA_ASSERT((m + tile - 1) / tile <= 65535 && k < int64_t(1) << 31 && n < int64_t(1) << 31,
                 "kernels: a product of {} x {} x {}", m, n, k);
  const Strided operands[] = {
      {c.data, bytes, c.batch}, {a.data, bytes, a.batch}, {b.data, bytes, b.batch}};
  for (const WalkPiece& piece : make_walks(batch, operands)) {
    TESSERA_ASSERT(piece.walk.count <= kMaxBatch, "kernels: a batch of {} products",
                   piece.walk.count);
    MatmulLaunch l{};
    auto at = [&](const Matrices& x, int i) {
      return static_cast<const char*>(x.data) + piece.begin[i] * bytes;
    };
    l.call.c = const_cast<char*>(at(c, 0)), l.call.a = at(a, 1), l.call.b = at(b, 2);
    l.call.result = {c.row, c.column};
    l.call.left = {a.row, a.column};
    l.call.right = {b.row, b.column};
    l.call.m = int(m), l.call.n = int(n), l.call.k = int(k), l.call.accumulate = accumulate;
    l.call.packs = int(in_packs(l.call.a, a.column, a.row, k, a.batch)) |
                   int(in_packs(l.call.b, b.row, b.column, k, b.batch)) << 1;
    l.call.batch = piece.walk;
    l.geometry = {
        {unsigned((n + tile - 1) / tile), unsigned((m + tile - 1) / tile), piece.walk.count},
        {256, 1, 1},
        0};
    launches.push_back(l);
  }
  return launches;
}

}  // namespace tessera::cuda
