// Deals the tiles of a batched product to threads; kernels/packed_gemm.cpp computes each whole,
// over all of k, so that neither threads nor tiles touch the order of a sum.
#include "core/backend/cpu/gemm.h"
#include "core/backend/cpu/isa.h"
#include "core/base/error.h"
#include "core/base/parallel.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kColumns = 512;  // at most so many in a tile: their panels stay in the cache
constexpr int64_t kRows = 64;      // rows come in groups of so many

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Extents of a tile. With leaves, several partial sums of a tile wait in the cache. Without, a tile
// packs its columns of B once for all its rows: as many rows as leave every thread a tile.
std::pair<int64_t, int64_t> tile_of(const Gemm& g, int64_t leaves, int64_t batch) {
  if (leaves) return {std::min(4 * kRows, g.m), std::min(kColumns / 4, g.n)};
  const int64_t columns = std::min(pieces(pieces(g.n, pieces(g.n, kColumns)), 32) * 32, g.n),
                others = batch * pieces(g.n, columns), wanted = pieces(num_threads(), others);
  return {std::min(pieces(pieces(g.m, wanted), kRows) * kRows, g.m), columns};
}

template <class T>
void run(const Gemm& g, int64_t leaves, const T* a, const T* b, T* c, const PackedGemmFns<T>& fns) {
  int64_t batch = 1;
  for (int i = 0; i < g.batch; ++i) batch *= g.extent[i];
  const auto [tile_m, tile_n] = tile_of(g, leaves, batch);
  const int64_t rows = pieces(g.m, tile_m), columns = pieces(g.n, tile_n);
  parallel_for(batch * rows * columns, 1, [&](int64_t begin, int64_t end) {
    PackedTile t{tile_m, tile_n, g.k, leaves, g.a_m, g.a_k, g.b_k, g.b_n, g.c_m};
    Tensor work = empty({fns.workspace(t)}, dtype_of<T>);
    for (int64_t at = begin; at < end; ++at) {
      int64_t which = at / (rows * columns), i = at / columns % rows * tile_m,
              j = at % columns * tile_n;
      int64_t to_a = i * g.a_m, to_b = j * g.b_n, to_c = i * g.c_m + j;
      for (int d = g.batch - 1; d >= 0; --d) {
        int64_t index = which % g.extent[d];
        which /= g.extent[d];
        to_a += index * g.a_batch[d], to_b += index * g.b_batch[d], to_c += index * g.c_batch[d];
      }
      t.m = std::min(tile_m, g.m - i), t.n = std::min(tile_n, g.n - j);
      fns.run(t, a + to_a, b + to_b, c + to_c, work.data<T>());
    }
  });
}

}  // namespace

void run_packed_gemm(const Gemm& g, int64_t leaves, const void* a, const void* b, void* c) {
  TESSERA_ASSERT(g.dtype == kF32 || g.dtype == kF64, "packed product in {}", name_of(g.dtype));
  TESSERA_ASSERT(leaves == 0 || g.k % leaves == 0, "{} leaves of {}", leaves, g.k);
  if (g.dtype == kF64)
    run(g, leaves, static_cast<const double*>(a), static_cast<const double*>(b),
        static_cast<double*>(c), simd<PackedGemmTable>().f64);
  else
    run(g, leaves, static_cast<const float*>(a), static_cast<const float*>(b),
        static_cast<float*>(c), simd<PackedGemmTable>().f32);
}

}  // namespace tessera::cpu
