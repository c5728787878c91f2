// Deals the tiles of a batched product to threads; kernels/exact_gemm.cpp computes each whole, over
// all of k, so that neither threads nor tiles touch the order of a sum.
#include "core/backend/cpu/gemm.h"
#include "core/backend/cpu/isa.h"
#include "core/base/error.h"
#include "core/base/parallel.h"

namespace tessera::cpu {
namespace {

// A tile's partial sums and its packed operands fit in the second-level cache.
constexpr int64_t kTileRows = 240, kTileColumns = 128;

template <class T>
void run(const Gemm& g, int64_t leaves, const T* a, const T* b, T* c, const ExactGemmFns<T>& fns) {
  int64_t batch = 1;
  for (int i = 0; i < g.batch; ++i) batch *= g.extent[i];
  const int64_t rows = (g.m + kTileRows - 1) / kTileRows,
                columns = (g.n + kTileColumns - 1) / kTileColumns;
  parallel_for(batch * rows * columns, 1, [&](int64_t begin, int64_t end) {
    ExactTile t{std::min(kTileRows, g.m),
                std::min(kTileColumns, g.n),
                g.k,
                leaves,
                g.a_m,
                g.a_k,
                g.b_k,
                g.b_n,
                g.c_m};
    Tensor work = empty({fns.workspace(t)}, dtype_of<T>);
    for (int64_t at = begin; at < end; ++at) {
      int64_t which = at / (rows * columns), i = at / columns % rows * kTileRows,
              j = at % columns * kTileColumns;
      int64_t to_a = i * g.a_m, to_b = j * g.b_n, to_c = i * g.c_m + j;
      for (int d = g.batch - 1; d >= 0; --d) {
        int64_t index = which % g.extent[d];
        which /= g.extent[d];
        to_a += index * g.a_batch[d], to_b += index * g.b_batch[d], to_c += index * g.c_batch[d];
      }
      t.m = std::min(kTileRows, g.m - i), t.n = std::min(kTileColumns, g.n - j);
      fns.run(t, a + to_a, b + to_b, c + to_c, work.data<T>());
    }
  });
}

}  // namespace

void run_exact_gemm(const Gemm& g, int64_t leaves, const void* a, const void* b, void* c) {
  TESSERA_ASSERT(g.dtype == kF32 || g.dtype == kF64, "exact product in {}", name_of(g.dtype));
  TESSERA_ASSERT(g.k % leaves == 0, "{} leaves of {}", leaves, g.k);
  if (g.dtype == kF64)
    run(g, leaves, static_cast<const double*>(a), static_cast<const double*>(b),
        static_cast<double*>(c), simd<ExactGemmTable>().f64);
  else
    run(g, leaves, static_cast<const float*>(a), static_cast<const float*>(b),
        static_cast<float*>(c), simd<ExactGemmTable>().f32);
}

}  // namespace tessera::cpu
