// Order statistics along a dim. NaN counts as the largest value, as in PyTorch; equal elements keep
// their order. Gradients go to the elements that were chosen.
#pragma once
#include "core/ops/scalar.h"
#include "core/primitive/registry.h"

namespace tessera {

/// Elements, and their positions as i64.
struct ValuesAndIndices {
  Tensor values, indices;
};

ValuesAndIndices sort(const Tensor& x, int64_t dim = -1, bool descending = false);
Tensor argsort(const Tensor& x, int64_t dim = -1, bool descending = false);
/// The k largest (or smallest) of `dim`, in order.
ValuesAndIndices topk(const Tensor& x, int64_t k, int64_t dim = -1, bool largest = true);
/// The k-th smallest of `dim`, from 1.
ValuesAndIndices kthvalue(const Tensor& x, int64_t k, int64_t dim = -1, bool keepdim = false);
/// The lower of the two in the middle; NaN where a row holds one.
ValuesAndIndices median(const Tensor& x, int64_t dim, bool keepdim = false);
Tensor median(const Tensor& x);

/// Position of the largest (smallest) element, the first of equal ones; NaN wins.
Tensor argmax(const Tensor& x, int64_t dim, bool keepdim = false);
Tensor argmin(const Tensor& x, int64_t dim, bool keepdim = false);
/// Its position in the flattened tensor.
Tensor argmax(const Tensor& x);
Tensor argmin(const Tensor& x);
ValuesAndIndices max(const Tensor& x, int64_t dim, bool keepdim = false);
ValuesAndIndices min(const Tensor& x, int64_t dim, bool keepdim = false);
/// The largest (smallest) of all elements; equal ones share the gradient.
Tensor max(const Tensor& x);
Tensor min(const Tensor& x);

struct UniqueResult {
  Tensor values;   // ascending [N]; N depends on the values of x
  Tensor inverse;  // i64, x's shape: where in `values` each element is
  Tensor counts;   // i64 [N]
};
UniqueResult unique(const Tensor& x);

/// For each x, the first position in ascending `edges` at which it could be inserted so that they
/// stay ascending (behind equal ones when `right`). edges [N], or [.., N] with x [.., M].
Tensor searchsorted(const Tensor& edges, const Tensor& x, bool right = false);
/// How often each integer from 0 occurs in x [N]; with `weights` [N] their sums. At least `length`
/// bins; their number depends on the values of x.
Tensor bincount(const Tensor& x, const Tensor& weights = {}, int64_t length = 0);

void register_sort_ops(OpRegistry& registry);

}  // namespace tessera
