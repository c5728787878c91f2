// Running reductions along a dim. Sums of 16-bit floats accumulate in f32; integers and bool in
// i64.
#pragma once
#include "core/ops/sort.h"

namespace tessera {

Tensor cumsum(const Tensor& x, int64_t dim);
Tensor cumprod(const Tensor& x, int64_t dim);
/// The running maximum (minimum) and its position, the last of equal ones; a NaN stays.
ValuesAndIndices cummax(const Tensor& x, int64_t dim);
ValuesAndIndices cummin(const Tensor& x, int64_t dim);
/// log(cumsum(exp(x))), shifted by the running maximum.
Tensor logcumsumexp(const Tensor& x, int64_t dim);
/// y[i] = a[i] y[i - 1] + b[i] along `dim`, y[-1] = 0; from the end when `reverse`. Its gradient,
/// and that of cumprod, is a linear_scan again.
Tensor linear_scan(const Tensor& a, const Tensor& b, int64_t dim, bool reverse = false);
/// x[i + 1] - x[i] along `dim`, `order` times.
Tensor diff(const Tensor& x, int64_t order = 1, int64_t dim = -1);

void register_scan_ops(OpRegistry& registry);

}  // namespace tessera
