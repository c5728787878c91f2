// Batched matrix products over strided memory: C = A B, the one shape that every contraction is
// brought to.
#pragma once
#include "core/tensor/tensor.h"

namespace tessera::cpu {

inline constexpr int kMaxBatch = 6;

/// C[..., m, n] = sum_k A[..., m, k] B[..., k, n]. Strides count elements; a batch stride of 0
/// repeats an operand. A has unit stride in m or k, B in k or n, C in n. dtype f32 or bf16
/// (oneDNN), f64 (BLAS).
struct Gemm {
  DType dtype = kF32;
  int batch = 0;
  int64_t extent[kMaxBatch];
  int64_t a_batch[kMaxBatch], b_batch[kMaxBatch], c_batch[kMaxBatch];
  int64_t m = 1, n = 1, k = 1;
  int64_t a_m = 0, a_k = 0, b_k = 0, b_n = 0, c_m = 0;
};

/// Whichever of the library and the packed product is faster. `work` is scratch of
/// gemm_workspace(g) bytes, asked for by the thread that runs g with as many threads.
void run_gemm(const Gemm& g, const void* a, const void* b, void* c, void* work);
size_t gemm_workspace(const Gemm& g);

/// The same product by our own kernel: f32, f64, and bf16 on a CPU with dot instructions where k
/// and the strides of rows are even and there are no leaves. The bits of an element depend on k and
/// `leaves` only: it is summed over k in `leaves` equal parts that meet in a balanced tree, or with
/// 0 in one chain (of f32 sums for bf16). `work` as above.
bool packed_gemm_takes(const Gemm& g);
void run_packed_gemm(const Gemm& g, int64_t leaves, const void* a, const void* b, void* c,
                     void* work);
size_t packed_gemm_workspace(const Gemm& g, int64_t leaves);

}  // namespace tessera::cpu
