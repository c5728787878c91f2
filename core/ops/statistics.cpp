#include "core/ops/statistics.h"

#include <cmath>

#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/indexing.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/scan.h"
#include "core/ops/views.h"

namespace tessera {

std::pair<Tensor, Tensor> var_mean(const Tensor& x, const Dims& dims, int64_t correction,
                                   bool keepdim) {
  return {var(x, dims, correction, keepdim), mean(x, dims, keepdim)};
}
std::pair<Tensor, Tensor> std_mean(const Tensor& x, const Dims& dims, int64_t correction,
                                   bool keepdim) {
  return {stddev(x, dims, correction, keepdim), mean(x, dims, keepdim)};
}
std::pair<Tensor, Tensor> aminmax(const Tensor& x, const Dims& dims, bool keepdim) {
  return {amin(x, dims, keepdim), amax(x, dims, keepdim)};
}

Tensor quantile(const Tensor& x, double q) { return quantile(flatten(x), q, 0); }
Tensor quantile(const Tensor& x, double q, int64_t dim, bool keepdim) {
  const int d = wrap_dim(dim, x.ndim(), "quantile");
  TESSERA_CHECK(q >= 0 && q <= 1 && is_floating(x.dtype()),
                "quantile: {} of {}; takes a share in [0, 1] and floats", q, describe(x));
  if (x.ndim() == 0) return x;
  const int64_t n = x.shape()[d];
  TESSERA_CHECK_AS(ShapeError, n > 0, "quantile: dim {} of {} is empty", d, describe(x));
  const Tensor sorted = sort(x, d).values;  // NaN last
  const double at = q * double(n - 1);
  const int64_t low = std::min(int64_t(at), n - 1), high = std::min(low + 1, n - 1);
  const Tensor a = narrow(sorted, d, low, 1), b = narrow(sorted, d, high, 1),
               last = narrow(sorted, d, n - 1, 1);
  const double share = at - double(low);
  Tensor y = share == 0 ? a : a + (b - a) * share;
  y = where(isnan(last), last, y);
  return keepdim ? y : squeeze(y, d);
}

Tensor cov(const Tensor& x, int64_t correction) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() == 1 || x.ndim() == 2,
                   "cov: {}; takes samples of variables, [V, N] or [N]", describe(x));
  if (x.ndim() == 1) return reshape(cov(unsqueeze(x, 0), correction), {});
  const Tensor apart = x - mean(x, 1, true);
  const double degrees = double(std::max<int64_t>(x.size(1) - correction, 0));
  return matmul(apart, transpose(apart, 0, 1)) / degrees;
}
Tensor corrcoef(const Tensor& x) {
  const Tensor c = cov(x);
  if (c.ndim() == 0) return c / c;
  const Tensor d = sqrt(diagonal(c));
  return clamp(c / unsqueeze(d, 1) / unsqueeze(d, 0), -1.0, 1.0);
}

Tensor histc(const Tensor& x, int64_t bins, double low, double high) {
  TESSERA_CHECK(bins > 0 && low <= high && std::isfinite(high - low) && is_floating(x.dtype()),
                "histc: {} bins from {} to {} of {}; takes at least one, a range and floats", bins,
                low, high, describe(x));
  const Tensor flat = flatten(x.detach());
  if (low == high && flat.numel() > 0) {
    low = amin(flat).item<double>(), high = amax(flat).item<double>();
    TESSERA_CHECK(std::isfinite(high - low),
                  "histc: the elements go from {} to {}; give a finite range", low, high);
  }
  if (low == high) low -= 1, high += 1;
  const Tensor inside = masked_select(flat, ge(flat, low) & le(flat, high));
  const Tensor bin = cast((inside - low) * (double(bins) / (high - low)), kI64);
  return cast(bincount(clamp(bin, int64_t(0), bins - 1), {}, bins), x.dtype());
}

Tensor trapezoid(const Tensor& y, double dx, int64_t dim) {
  const int d = wrap_dim(dim, y.ndim(), "trapezoid");
  TESSERA_CHECK_AS(ShapeError, y.ndim() > 0, "trapezoid: {} has no dim", describe(y));
  const int64_t n = std::max<int64_t>(y.shape()[d], 1);
  return sum(slice(y, d, 0, n - 1) + slice(y, d, 1, n), d) * (dx / 2);
}

UniqueResult unique_consecutive(const Tensor& x) {
  const Tensor flat = flatten(x.detach());
  const int64_t n = flat.numel();
  if (n == 0)
    return {flat, zeros(x.shape(), {.dtype = kI64, .device = x.device()}),
            zeros(0, {.dtype = kI64, .device = x.device()})};
  const Tensor begins = cat({ones(1, {.dtype = kBool, .device = x.device()}),
                             ne(narrow(flat, 0, 1, n - 1), narrow(flat, 0, 0, n - 1))});
  const Tensor at = select(nonzero(begins), 1, 0);
  const Tensor ends = cat({slice(at, 0, 1, at.numel()), tensor({n}, {.device = x.device()})});
  return {masked_select(flat, begins), reshape(cumsum(begins, 0) - 1, x.shape()), ends - at};
}

Tensor isin(const Tensor& x, const Tensor& values) {
  if (values.numel() == 0) return zeros(x.shape(), {.dtype = kBool, .device = x.device()});
  const DType t = promote(x.dtype(), values.dtype());
  const Tensor sorted = sort(cast(flatten(values.detach()), t), 0).values,
               flat = cast(flatten(x.detach()), t),
               at = clamp(searchsorted(sorted, flat), int64_t(0), values.numel() - 1);
  return reshape(eq(index_select(sorted, 0, at), flat), x.shape());
}

Tensor bucketize(const Tensor& x, const Tensor& edges, bool right) {
  TESSERA_CHECK_AS(ShapeError, edges.ndim() == 1, "bucketize: edges are {}; they are [N]",
                   describe(edges));
  return searchsorted(edges, x, right);
}

Tensor renorm(const Tensor& x, double p, int64_t dim, double max_norm) {
  const int d = wrap_dim(dim, x.ndim(), "renorm");
  TESSERA_CHECK(p > 0 && max_norm >= 0, "renorm: norms of order {} at most {}", p, max_norm);
  TESSERA_CHECK_AS(ShapeError, x.ndim() > 1, "renorm: {} has no slices", describe(x));
  Dims others;
  for (int i = 0; i < x.ndim(); ++i)
    if (i != d) others.push_back(i);
  const Tensor norms = norm(x, p, others, true);
  return x * where(gt(norms, max_norm), max_norm / (norms + 1e-7), 1.0);
}

}  // namespace tessera
