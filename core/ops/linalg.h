// Linear algebra of matrices, named as in torch.linalg, with two differences: cholesky factors the
// symmetric part of its operand, where torch reads one triangle, and svd and qr are always the
// reduced ones. The last two dims are the matrix, the dims before them a batch: [.., M, N]. A
// matrix is computed on one rank, so only batch dims (and right-hand sides) may be split. f64 and
// f32 run in LAPACK; 16-bit floats are computed in f32 and rounded once. Everything has derivatives
// of any order.
#pragma once
#include "core/ops/reduce.h"

namespace tessera::linalg {

/// L [.., N, N], lower triangular, with L L' = a; its transpose where `upper`. Factors the
/// symmetric part (a + a')/2, so the gradient is symmetric. Throws UserError naming the first
/// matrix of the batch that is not positive-definite, and the pivot where that shows. Derivative:
/// Murray 2016, "Differentiation of the Cholesky decomposition", section 4.
Tensor cholesky(const Tensor& a, bool upper = false);

struct TriangularOptions {
  bool upper;                  // has no default: which triangle of a is read
  bool left = true;            // a x = b; otherwise x a = b
  bool unitriangular = false;  // the diagonal of a counts as ones
};
/// x with a x = b: a [.., N, N], b [.., N, K] (left) or [.., K, N]; batch dims broadcast. A
/// transposed a is the view transpose(a, -2, -1) with the other `upper`: nothing is copied. Throws
/// UserError naming the first singular matrix and its pivot, an element of the diagonal that is 0.
Tensor solve_triangular(const Tensor& a, const Tensor& b, TriangularOptions options);

struct QR {
  Tensor q, r;
};
/// a [.., M, N] = q r with K = min(M, N): q [.., M, K] has orthonormal columns, r [.., K, N] is
/// upper triangular; signs are LAPACK's. The gradient needs the first K columns of a to be
/// independent and throws UserError, naming the matrix, where r is singular. Derivative: Walter &
/// Lehmann 2018, "Algorithmic differentiation of linear algebra functions with application in
/// optimum experimental design"; wide matrices: Liao et al. 2019, "Differentiable programming
/// tensor networks", appendix.
QR qr(const Tensor& a);

struct SVD {
  Tensor u, s, vh;
};
/// a [.., M, N] = u diag(s) vh with K = min(M, N): u [.., M, K], s [.., K] falling, vh [.., K, N];
/// signs are LAPACK's. Gradients through u and vh need distinct singular values that are not 0 and
/// a loss that does not depend on those signs; first derivatives through s alone need nothing.
/// Derivative: Townsend 2016, "Differentiating the singular value decomposition".
SVD svd(const Tensor& a);
Tensor svdvals(const Tensor& a);

/// norm, under the name that it has in torch.linalg.
inline Tensor vector_norm(const Tensor& x, double ord = 2, const Dims& dims = {},
                          bool keepdim = false) {
  return norm(x, ord, dims, keepdim);
}

enum class MatrixNorm : uint8_t { kFrobenius, kNuclear };
/// Norms of the matrices in two dims. kFrobenius: root of the sum of squares; kNuclear: sum of the
/// singular values. ord 1 and -1: largest and smallest sum of magnitudes of a column; infinity and
/// -infinity: of a row; 2 and -2: largest and smallest singular value. Throws UserError for others.
Tensor matrix_norm(const Tensor& a, MatrixNorm ord = MatrixNorm::kFrobenius,
                   const Dims& dims = {-2, -1}, bool keepdim = false);
Tensor matrix_norm(const Tensor& a, double ord, const Dims& dims = {-2, -1}, bool keepdim = false);

}  // namespace tessera::linalg
