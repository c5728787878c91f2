// Reductions over pieces of uneven length: segments of a dim, and rows of a sparse matrix in
// compressed form (CSR). Sums have a fixed order that does not depend on threads.
#pragma once
#include "core/ops/indexing.h"

namespace tessera {

/// Reduces consecutive segments of `dim`: segment s holds the elements offsets[s] up to
/// offsets[s + 1]. offsets i64 [S + 1] rises from 0 to the extent of `dim`; the result has extent S
/// there. Empty segments give 0 (sum), 1 (prod), NaN (mean), -infinity (amax), infinity (amin).
/// Equal extremes share the gradient; that of a product divides by each factor (infinite: NaN).
/// Throws UserError naming the offset that is wrong.
Tensor segment_reduce(const Tensor& data, const Tensor& offsets, ScatterReduce how,
                      int64_t dim = 0);
/// Offsets of segments of these lengths, i64 [S] -> [S + 1].
Tensor offsets_of(const Tensor& lengths);

/// A sparse matrix [M, N]: values[e] of row m, crow[m] <= e < crow[m + 1], is in column col[e].
/// crow i64 [M + 1] rises from 0 to E, col i64 [E] holds columns in any order; a place may be named
/// twice. Throws UserError naming the entry that is wrong.
struct Csr {
  Tensor crow, col;
};

/// [M, K]: for each row the sum, mean, maximum or minimum over its edges e of values[e] times
/// dense[col[e]]; 0 for rows without edges. values [E], undefined: ones; dense [N, K]. The first of
/// equal extremes has the gradient. kProd is refused.
Tensor spmm_reduce(const Csr& a, const Tensor& values, const Tensor& dense,
                   ScatterReduce how = ScatterReduce::kSum);
/// [E]: a[m] . b[col[e]] for each edge e of row m; a [M, K], b [N, K]. Sampled dense-dense product,
/// the gradient of spmm_reduce by values.
Tensor sddmm(const Csr& at, const Tensor& a, const Tensor& b);

struct CsrTranspose {
  Csr transposed;  // [N, M]; rows ascend within a column
  Tensor order;    // i64 [E]: edge e there is edge order[e] here
};
/// In time linear in edges and columns.
CsrTranspose csr_transpose(const Csr& a, int64_t columns);

}  // namespace tessera
