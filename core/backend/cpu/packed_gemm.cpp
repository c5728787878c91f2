// Deals the tiles of a batched product to threads; kernels/packed_gemm.cpp computes each whole,
// over all of k, so that neither threads nor tiles touch the order of a sum.
#include <algorithm>
#include <numeric>
#include <tuple>
#include <type_traits>

#include "core/backend/cpu/gemm.h"
#include "core/backend/cpu/isa.h"
#include "core/base/boundary.h"
#include "core/base/error.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kColumns =
    limit("packed.columns");  // at most so many in a tile, so that deep panels fit the cache
constexpr int64_t kRows = limit("packed.rows");  // rows come in groups of so many

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Twice as many beside packed columns of A, in pieces that are not as deep. In bf16, sums of one
// piece wait in f32 for the next: as few that all of k fits the cache at once, or half of them.
int64_t most_columns(const Gemm& g) {
  constexpr int64_t kFit = 384 * 1024;  // elements: kPackedBytes of kernels/packed_gemm.cpp
  if (g.dtype != kBF16) return g.a_k == 1 ? kColumns : 2 * kColumns;
  const int64_t deep = kFit / (kColumns + (g.a_k == 1 ? 0 : kRows));
  meet("packed.fit", g.k / 2, deep / 2);  // they are summed in pairs
  return g.k > deep ? kColumns / 2 : kColumns;
}

// Extents of a tile. With leaves, several partial sums of a tile wait in the cache. Without, a tile
// packs its columns of B once for all its rows: threads share columns evenly, and rows only where
// there are too few columns.
std::pair<int64_t, int64_t> tile_of(const Gemm& g, int64_t leaves, int64_t batch) {
  if (leaves) return {std::min(4 * kRows, g.m), std::min(kColumns / 2, g.n)};
  const int64_t threads = num_threads(), shared = threads / std::gcd(threads, batch);
  auto columns_of = [&](int64_t cuts) { return pieces(pieces(g.n, cuts), 32) * 32; };
  int64_t cuts = pieces(g.n, most_columns(g));
  if (int64_t even = pieces(cuts, shared) * shared; columns_of(even) >= kColumns / 4) cuts = even;
  const int64_t columns = std::min(columns_of(cuts), g.n), others = batch * pieces(g.n, columns),
                wanted = threads / std::gcd(threads, others);
  return {std::min(pieces(pieces(g.m, wanted), kRows) * kRows, g.m), columns};
}

// A product cut into tiles, and these into as many shares as threads will take, each with scratch
// of its own.
struct Cut {
  int64_t tile_m, tile_n, rows, columns, tiles, shares;
  PackedTile tile;
  Cut(const Gemm& g, int64_t leaves) {
    int64_t batch = 1;
    for (int i = 0; i < g.batch; ++i) batch *= g.extent[i];
    std::tie(tile_m, tile_n) = tile_of(g, leaves, batch);
    rows = pieces(g.m, tile_m), columns = pieces(g.n, tile_n), tiles = batch * rows * columns;
    shares = std::min<int64_t>(tiles, num_threads());
    tile = {tile_m, tile_n, g.k, leaves, g.a_m, g.a_k, g.b_k, g.b_n, g.c_m};
  }
};

// The type that scratch is counted in.
template <class T>
using WorkOf = std::conditional_t<std::is_same_v<T, uint16_t>, float, T>;

template <class T>
const auto& fns() {
  const PackedGemmTable& table = simd<PackedGemmTable>();
  if constexpr (std::is_same_v<T, uint16_t>)
    return table.bf16;
  else if constexpr (std::is_same_v<T, float>)
    return table.f32;
  else
    return table.f64;
}

// Elements of scratch of one share, in whole cache lines.
template <class T>
int64_t share_of(const Cut& cut) {
  return pieces(fns<T>().workspace(cut.tile), 64) * 64;
}

template <class T>
void run(const Gemm& g, int64_t leaves, const void* a_at, const void* b_at, void* c_at,
         void* scratch_at) {
  const T *a = static_cast<const T*>(a_at), *b = static_cast<const T*>(b_at);
  T* c = static_cast<T*>(c_at);
  auto* work = static_cast<WorkOf<T>*>(scratch_at);
  const Cut cut(g, leaves);
  const int64_t share = share_of<T>(cut);
  auto run_tile = [&](int64_t at, WorkOf<T>* scratch) {
    PackedTile t = cut.tile;
    int64_t which = at / (cut.rows * cut.columns), i = at / cut.columns % cut.rows * cut.tile_m,
            j = at % cut.columns * cut.tile_n;
    int64_t to_a = i * g.a_m, to_b = j * g.b_n, to_c = i * g.c_m + j;
    for (int d = g.batch - 1; d >= 0; --d) {
      int64_t index = which % g.extent[d];
      which /= g.extent[d];
      to_a += index * g.a_batch[d], to_b += index * g.b_batch[d], to_c += index * g.c_batch[d];
    }
    t.m = std::min(cut.tile_m, g.m - i), t.n = std::min(cut.tile_n, g.n - j);
    fns<T>().run(t, a + to_a, b + to_b, c + to_c, scratch);
  };
  meet("packed.rows", g.m), meet("packed.columns", g.n);
  meet("packed.tile_rows", g.m, fns<T>().rows), meet("packed.tile_columns", g.n, fns<T>().columns);
  if (counting_boundaries())
    meet("packed.depth", leaves ? g.k / leaves : g.k, fns<T>().depth(cut.tile));
  parallel_for("packed.shares", cut.shares, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s)
      for (int64_t at = cut.tiles * s / cut.shares; at < cut.tiles * (s + 1) / cut.shares; ++at)
        run_tile(at, work + s * share);
  });
}

}  // namespace

bool packed_gemm_takes(const Gemm& g) {
  if (g.dtype != kBF16) return g.dtype == kF32 || g.dtype == kF64;
  auto even_rows = [](int64_t row, int64_t element) { return element != 1 || row % 2 == 0; };
  return has_bf16_dot() && g.k % 2 == 0 && even_rows(g.a_m, g.a_k) && even_rows(g.b_n, g.b_k) &&
         (g.b_k == 1 || g.b_n == 1);
}

void run_packed_gemm(const Gemm& g, int64_t leaves, const void* a, const void* b, void* c,
                     void* work) {
  TESSERA_ASSERT(packed_gemm_takes(g), "packed product in {}", name_of(g.dtype));
  TESSERA_ASSERT(leaves == 0 || (g.k % leaves == 0 && g.dtype != kBF16), "{} leaves of {}", leaves,
                 g.k);
  if (g.dtype == kF64)
    run<double>(g, leaves, a, b, c, work);
  else if (g.dtype == kF32)
    run<float>(g, leaves, a, b, c, work);
  else
    run<uint16_t>(g, leaves, a, b, c, work);
}

size_t packed_gemm_workspace(const Gemm& g, int64_t leaves) {
  const Cut cut(g, leaves);
  const size_t shares = size_t(cut.shares);
  if (g.dtype == kF64) return shares * sizeof(double) * size_t(share_of<double>(cut));
  if (g.dtype == kF32) return shares * sizeof(float) * size_t(share_of<float>(cut));
  return shares * sizeof(float) * size_t(share_of<uint16_t>(cut));
}

}  // namespace tessera::cpu
