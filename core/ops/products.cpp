#include "core/ops/products.h"

#include "core/ops/einsum.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

void check_ndims(const char* op, const Tensor& a, int ndim_a, const Tensor& b, int ndim_b) {
  TESSERA_CHECK_AS(ShapeError, a.ndim() == ndim_a && b.ndim() == ndim_b,
                   "{}: takes operands of {} and {} dims, got {} and {}; matmul takes others", op,
                   ndim_a, ndim_b, describe(a), describe(b));
}

// Dims of x that are not in `taken`, which may be negative.
Dims rest_of(const Tensor& x, const Dims& taken) {
  uint32_t mask = 0;
  for (int64_t d : taken) mask |= 1u << wrap_dim(d, x.ndim(), "tensordot");
  Dims rest;
  for (int d = 0; d < x.ndim(); ++d)
    if (!(mask >> d & 1)) rest.push_back(d);
  return rest;
}

// A tensor with its dims `first` in front of its dims `then`, and the extents of each group.
struct TwoGroups {
  Tensor x;
  Shape first, then;
};
TwoGroups grouped(const Tensor& x, const Dims& first, const Dims& then) {
  TwoGroups g;
  Dims order;
  for (int64_t d : first) order.push_back(d), g.first.push_back(x.size(d));
  for (int64_t d : then) order.push_back(d), g.then.push_back(x.size(d));
  g.x = reshape(permute(x, order), {numel(g.first), numel(g.then)});
  return g;
}

}  // namespace

Tensor mm(const Tensor& a, const Tensor& b) {
  check_ndims("mm", a, 2, b, 2);
  return matmul(a, b);
}
Tensor bmm(const Tensor& a, const Tensor& b) {
  check_ndims("bmm", a, 3, b, 3);
  TESSERA_CHECK_AS(ShapeError, a.size(0) == b.size(0), "bmm: batches of {} and {} differ",
                   describe(a), describe(b));
  return matmul(a, b);
}
Tensor mv(const Tensor& a, const Tensor& v) {
  check_ndims("mv", a, 2, v, 1);
  return matmul(a, v);
}
Tensor addmm(const Tensor& x, const Tensor& a, const Tensor& b, Scalar beta, Scalar alpha) {
  Tensor product = mm(a, b);
  TESSERA_CHECK_AS(ShapeError, broadcast(x.shape(), product.shape(), "addmm") == product.shape(),
                   "addmm: {} does not broadcast to {}", describe(x), describe(product));
  if (alpha.real() != 1) product = std::move(product) * alpha;
  // x is not read when beta is 0, so a NaN in it has no effect.
  if (beta.real() == 0) return product;
  return beta.real() == 1 ? x + std::move(product) : x * beta + std::move(product);
}

Tensor tensordot(const Tensor& a, const Tensor& b, int64_t dims) {
  TESSERA_CHECK_AS(ShapeError, dims >= 0 && dims <= a.ndim() && dims <= b.ndim(),
                   "tensordot: {} dims of {} and {}", dims, describe(a), describe(b));
  Dims of_a, of_b;
  for (int64_t i = 0; i < dims; ++i) of_a.push_back(a.ndim() - dims + i), of_b.push_back(i);
  return tensordot(a, b, of_a, of_b);
}
Tensor tensordot(const Tensor& a, const Tensor& b, const Dims& dims_a, const Dims& dims_b) {
  const TwoGroups x = grouped(a, rest_of(a, dims_a), dims_a),
                  y = grouped(b, dims_b, rest_of(b, dims_b));
  TESSERA_CHECK_AS(ShapeError, x.then == y.first,
                   "tensordot: dims {} of {} against dims {} of {} have other extents",
                   to_string(dims_a), describe(a), to_string(dims_b), describe(b));
  Shape result = x.first;
  for (int64_t e : y.then) result.push_back(e);
  return reshape(matmul(x.x, y.x), result);
}

Tensor kron(const Tensor& a, const Tensor& b) {
  const int n = std::max(a.ndim(), b.ndim());
  TESSERA_CHECK_AS(ShapeError, 2 * n <= kMaxDims, "kron: {} and {} have more than {} dims",
                   describe(a), describe(b), kMaxDims / 2);
  // a [a0, 1, a1, 1, ..] and b [1, b0, 1, b1, ..].
  Shape of_a, of_b, result;
  for (int d = 0; d < n; ++d) {
    const int i = d - (n - a.ndim()), j = d - (n - b.ndim());
    const int64_t p = i < 0 ? 1 : a.shape()[i], q = j < 0 ? 1 : b.shape()[j];
    of_a.push_back(p), of_a.push_back(1), of_b.push_back(1), of_b.push_back(q);
    result.push_back(p * q);
  }
  return reshape(reshape(a, of_a) * reshape(b, of_b), result);
}

Tensor bilinear(const Tensor& a, const Tensor& b, const Tensor& weight, const Tensor& bias) {
  const Tensor y = einsum("...n,onm,...m->...o", a, weight, b);
  return bias.defined() ? y + bias : y;
}

Tensor cdist(const Tensor& a, const Tensor& b, double p) {
  TESSERA_CHECK_AS(ShapeError, a.ndim() >= 2 && b.ndim() >= 2 && a.size(-1) == b.size(-1),
                   "cdist: {} and {}; takes rows of one length, [.., P, M] and [.., R, M]",
                   describe(a), describe(b));
  return norm(unsqueeze(a, -2) - unsqueeze(b, -3), p, -1);
}

Tensor trace(const Tensor& x) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() == 2, "trace: {} is no matrix", describe(x));
  return sum(diagonal(x));
}

}  // namespace tessera
