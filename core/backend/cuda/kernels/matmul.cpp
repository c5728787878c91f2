// Instances and launches of matrix products; see matmul.h.
#include "core/backend/cuda/kernels/matmul.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr int64_t kMaxBlocks = 65535;                    // along y and along z
constexpr unsigned kSharedBytes = 4 * 2 * 128 * 40 * 2;  // stages, operands, a tile of 16 bits
// Sums are cut where their result has fewer tiles than this, into parts of kPart elements at least.
constexpr int64_t kFewTiles = 256, kPart = 512;

bool on_units(DType t) { return t == kF16 || t == kBF16; }
int64_t tile_of(bool units) { return units ? 128 : 64; }

// Bits of an operand; `rows` is the dim that it has besides k.
struct Layout {
  bool turned = false;  // lines run along its rows
  bool packs = false;   // lines come in packs of 16 bytes
};
Layout layout_of(const void* data, int64_t along_k, int64_t along_rows, int64_t k, int64_t rows,
                 std::span<const int64_t> batch) {
  auto fits = [](int64_t elements) { return elements % 8 == 0; };
  const bool turned = along_k != 1 && along_rows == 1;
  return {turned, (turned ? along_rows : along_k) == 1 && fits(turned ? along_k : along_rows) &&
                      fits(turned ? rows : k) && std::all_of(batch.begin(), batch.end(), fits) &&
                      reinterpret_cast<uintptr_t>(data) % 16 == 0};
}
bool in_pairs(const void* data, const Matrices& c, int64_t n, int64_t part_stride) {
  auto fits = [](int64_t elements) { return elements % 2 == 0; };
  return c.column == 1 && fits(c.row) && fits(n) && fits(part_stride) &&
         std::all_of(c.batch.begin(), c.batch.end(), fits) &&
         reinterpret_cast<uintptr_t>(data) % 8 == 0;
}

Instance instance_of(DType t, std::string_view form, std::string matmul, int blocks) {
  return {fmt::format("matmul_{}_{}", name_of(t), form),
          {{"MATMUL", std::move(matmul)}, {"BLOCKS", std::to_string(blocks)}}};
}
std::string_view turned_name(bool a, bool b) {
  return a ? (b ? "turned" : "turned_a") : b ? "turned_b" : "rows";
}

}  // namespace

std::vector<Instance> matmul_instances(DType t) {
  const std::string_view type = element_type(name_of(t));
  // Two blocks leave a thread 128 registers, in which sums of 64 bits or of several leaves do not
  // fit.
  const int blocks = t == kF64 || !is_floating(t) ? 1 : 2;
  std::vector<Instance> all;
  if (on_units(t)) {
    for (bool a : {false, true})
      for (bool b : {false, true})
        all.push_back(instance_of(t, turned_name(a, b),
                                  fmt::format("matmul_tensor<{}, {}, {}>", type, a, b), blocks));
  } else {
    all.push_back(instance_of(t, "scalar", fmt::format("matmul_scalar<{}>", type), blocks));
  }
  if (is_floating(t))
    all.push_back(instance_of(t, "exact", fmt::format("matmul_exact<{}>", type), 1));
  return all;
}

int64_t matmul_parts(DType dtype, int64_t batch, int64_t m, int64_t n, int64_t k) {
  if (!is_floating(dtype)) return 1;
  const int64_t tile = tile_of(on_units(dtype));
  const int64_t tiles = batch * ((m + tile - 1) / tile) * ((n + tile - 1) / tile);
  if (tiles == 0 || tiles >= kFewTiles) return 1;
  return std::max<int64_t>(1, std::min(kFewTiles / tiles, k / kPart));
}

std::vector<MatmulLaunch> matmul_launches(DType dtype, std::span<const int64_t> batch, int64_t m,
                                          int64_t n, int64_t k, const Matrices& c,
                                          const Matrices& a, const Matrices& b,
                                          const MatmulSum& sum) {
  std::vector<MatmulLaunch> launches;
  if (m == 0 || n == 0) return launches;
  const bool exact = sum.leaves > 0 && is_floating(dtype), units = on_units(dtype) && !exact,
             wide = units && sum.wide;
  TESSERA_ASSERT(
      !exact ||
          (sum.parts == 1 && k % sum.leaves == 0 && sum.leaves <= int64_t(1) << kMatmulLevels),
      "kernels: a sum of {} elements in {} leaves and {} parts", k, sum.leaves, sum.parts);
  const int bytes = int(size_of(dtype)), out_bytes = wide ? 4 : bytes;
  const int64_t tile = tile_of(units);
  constexpr int64_t kMost = (int64_t(1) << 31) - 256;  // kernels count by tiles
  TESSERA_CHECK(k < kMost && n < kMost,
                "matmul: a product of {} x {} x {} is more than kernels count in 31 bits", m, k, n);
  // Parts begin where 16 bytes do.
  const int64_t part = std::max<int64_t>(64, ((k + sum.parts - 1) / sum.parts + 63) / 64 * 64);
  const Strided operands[] = {
      {c.data, out_bytes, c.batch}, {a.data, bytes, a.batch}, {b.data, bytes, b.batch}};
  for (const WalkPiece& piece : make_walks(batch, operands))
    for (int64_t first = 0; first < piece.walk.count * sum.parts; first += kMaxBlocks)
      for (int64_t row = 0; row < m; row += kMaxBlocks * tile) {
        const int64_t rows = std::min(kMaxBlocks * tile, m - row);
        auto at = [](const Matrices& x, int64_t skipped, int each) {
          return static_cast<const char*>(x.data) + skipped * each;
        };
        MatmulLaunch l{};
        MatmulCall& call = l.call;
        call.c = const_cast<char*>(at(c, piece.begin[0] + row * c.row, out_bytes));
        call.a = at(a, piece.begin[1] + row * a.row, bytes);
        call.b = at(b, piece.begin[2], bytes);
        call.result = {c.row, c.column};
        call.left = {a.row, a.column};
        call.right = {b.row, b.column};
        call.part_stride = sum.part_stride;
        call.m = int(rows), call.n = int(n), call.k = int(k);
        call.parts = int(sum.parts),
        call.part = int(sum.parts > 1 ? part : std::max<int64_t>(k, 1));
        call.leaves = int(sum.leaves), call.wide = wide;
        const Layout left = layout_of(call.a, a.column, a.row, k, rows, a.batch),
                     right = layout_of(call.b, b.row, b.column, k, n, b.batch);
        call.packs = int(left.packs) | int(right.packs) << 1 |
                     int(in_pairs(call.c, c, n, sum.part_stride)) << 2;
        l.instance = fmt::format("matmul_{}_{}", name_of(dtype),
                                 exact    ? "exact"
                                 : !units ? "scalar"
                                          : turned_name(left.turned, right.turned));
        call.first = unsigned(first), call.batch = piece.walk;
        l.geometry = {
            {unsigned((n + tile - 1) / tile), unsigned((rows + tile - 1) / tile),
             unsigned(std::min<int64_t>(kMaxBlocks, piece.walk.count * sum.parts - first))},
            {256, 1, 1},
            units ? kSharedBytes : 0};
        launches.push_back(std::move(l));
      }
  return launches;
}

}  // namespace tessera::cuda
