// Products of vectors and matrices under the names by which PyTorch has them: compositions of
// matmul, einsum and pointwise ops. Names, arguments and semantics are PyTorch's.
#pragma once
#include "core/ops/contract.h"
#include "core/ops/scalar.h"

namespace tessera {

Tensor mm(const Tensor& a, const Tensor& b);   // [M, K], [K, N] -> [M, N]
Tensor bmm(const Tensor& a, const Tensor& b);  // [B, M, K], [B, K, N] -> [B, M, N]
Tensor mv(const Tensor& a, const Tensor& v);   // [M, K], [K] -> [M]
/// beta x + alpha a b; x broadcasts to [M, N].
Tensor addmm(const Tensor& x, const Tensor& a, const Tensor& b, Scalar beta = 1, Scalar alpha = 1);
/// Sums the last `dims` dims of a against the first of b.
Tensor tensordot(const Tensor& a, const Tensor& b, int64_t dims = 2);
/// Sums dims_a[i] of a against dims_b[i] of b; the rest of a's dims, then the rest of b's.
Tensor tensordot(const Tensor& a, const Tensor& b, const Dims& dims_a, const Dims& dims_b);
/// Every element of a times all of b, laid out as blocks. Each has at most 4 dims.
Tensor kron(const Tensor& a, const Tensor& b);
/// a [.., N], weight [O, N, M], b [.., M] -> [.., O], plus bias [O] where given.
Tensor bilinear(const Tensor& a, const Tensor& b, const Tensor& weight, const Tensor& bias = {});
/// a [.., P, M], b [.., R, M] -> [.., P, R]: norms of order p of differences of rows, which are
/// held in memory.
Tensor cdist(const Tensor& a, const Tensor& b, double p = 2);
Tensor trace(const Tensor& x);  // sum of the diagonal of a matrix

}  // namespace tessera
