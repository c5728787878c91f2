// Batched matrix products over strided memory, C = A B: every contraction is computed as one.
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
  int64_t extent[kMaxBatch] = {};
  int64_t a_batch[kMaxBatch] = {}, b_batch[kMaxBatch] = {}, c_batch[kMaxBatch] = {};
  int64_t m = 1, n = 1, k = 1;
  int64_t a_m = 0, a_k = 0, b_k = 0, b_n = 0, c_m = 0;
};

/// A product and what was decided about it beforehand: whether the library or the packed product
/// computes it, whichever is faster, on how many threads, in how much scratch. It is run under the
/// settings (PlanSettings) that it was planned under, by one thread at a time.
class PlannedGemm {
 public:
  PlannedGemm() = default;
  explicit PlannedGemm(const Gemm& g);
  size_t workspace_bytes() const { return workspace_bytes_; }
  /// `work` is scratch of workspace_bytes().
  void run(const void* a, const void* b, void* c, void* work) const;

 private:
  enum class By : uint8_t { kBlas, kPacked, kOneDnn };
  Gemm g_;
  By by_ = By::kBlas;
  bool one_thread_ = false;  // so few multiplications that others are not woken
  size_t workspace_bytes_ = 0;
  Ref<const RefCounted> library_;  // the primitive of kOneDnn
};

/// The same product by our own kernel: f32, f64, and bf16 on a CPU with dot instructions where k
/// and the strides of rows are even and there are no leaves. The bits of an element depend on k and
/// `leaves` only: it is summed over k in `leaves` equal parts that meet in a balanced tree, or with
/// 0 in one chain (of f32 sums for bf16). `work` is scratch of packed_gemm_workspace(g, leaves)
/// bytes, asked for on as many threads.
bool packed_gemm_takes(const Gemm& g);
void run_packed_gemm(const Gemm& g, int64_t leaves, const void* a, const void* b, void* c,
                     void* work);
size_t packed_gemm_workspace(const Gemm& g, int64_t leaves);

}  // namespace tessera::cpu
