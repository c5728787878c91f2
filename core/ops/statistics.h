// Statistics of samples, as compositions of reductions and order statistics. Names, arguments and
// semantics are PyTorch's.
#pragma once
#include <utility>

#include "core/ops/reduce.h"
#include "core/ops/sort.h"

namespace tessera {

/// var and mean; stddev and mean.
std::pair<Tensor, Tensor> var_mean(const Tensor& x, const Dims& dims = {}, int64_t correction = 1,
                                   bool keepdim = false);
std::pair<Tensor, Tensor> std_mean(const Tensor& x, const Dims& dims = {}, int64_t correction = 1,
                                   bool keepdim = false);
/// amin and amax.
std::pair<Tensor, Tensor> aminmax(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
/// The value below which a share q of the elements is, of all or along `dim`; between two elements
/// it is interpolated linearly. NaN where there is one. x has floats and at least one element.
Tensor quantile(const Tensor& x, double q);
Tensor quantile(const Tensor& x, double q, int64_t dim, bool keepdim = false);
/// x [V, N], N samples of V variables (or [N], of one) -> [V, V] (or 0-d).
Tensor cov(const Tensor& x, int64_t correction = 1);
Tensor corrcoef(const Tensor& x);  // cov over the product of both deviations, in [-1, 1]
/// The number of elements in each of `bins` equal parts of [low, high], in x's dtype; elements
/// outside are not counted. low == high: the range is that of the values, which are read then.
Tensor histc(const Tensor& x, int64_t bins = 100, double low = 0, double high = 0);
/// The integral of y along `dim` by trapezoids, places being dx apart.
Tensor trapezoid(const Tensor& y, double dx = 1, int64_t dim = -1);
/// As unique, but of each run of equal elements in the flattened tensor, in order.
UniqueResult unique_consecutive(const Tensor& x);
/// bool, x's shape: whether `values` hold the element. NaN is nowhere.
Tensor isin(const Tensor& x, const Tensor& values);
/// searchsorted with its arguments in the other order: the part between `edges` [N] in which each x
/// falls.
Tensor bucketize(const Tensor& x, const Tensor& edges, bool right = false);
/// Each slice of `dim` whose norm of order p exceeds max_norm, shrunk to it.
Tensor renorm(const Tensor& x, double p, int64_t dim, double max_norm);

}  // namespace tessera
