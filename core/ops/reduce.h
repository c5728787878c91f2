// Reductions over dims; `dims` empty means all. Sums of 16-bit floats accumulate in f32. Order of
// summation is fixed: it does not depend on the number of threads.
#pragma once
#include <utility>

#include "core/ops/scalar.h"
#include "core/primitive/registry.h"

namespace tessera {

Tensor sum(const Tensor& x, const Dims& dims = {},
           bool keepdim = false);  // integers and bool sum in i64
Tensor mean(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
Tensor prod(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
Tensor amax(const Tensor& x, const Dims& dims = {},
            bool keepdim = false);  // gradient shared evenly among equal maxima
Tensor amin(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
Tensor any(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
Tensor all(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
/// The sum of squared deviations from the mean, divided by the number of values less `correction`.
Tensor var(const Tensor& x, const Dims& dims = {}, int64_t correction = 1, bool keepdim = false);
/// The root of var. It is not called std because that is the standard library's namespace in a
/// program that says `using namespace tessera`; x.std() is the same.
Tensor stddev(const Tensor& x, const Dims& dims = {}, int64_t correction = 1, bool keepdim = false);
/// log(sum(exp(x))), shifted by the maximum.
Tensor logsumexp(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
/// (sum |x|^p)^(1/p) over `dims` (empty: all); p may be 0 (the number of elements that are not 0)
/// or +-infinity (the largest, the smallest magnitude). The gradient is 0 at a 0 where the slope is
/// infinite or undefined.
Tensor norm(const Tensor& x, double p = 2, const Dims& dims = {}, bool keepdim = false);

/// `x` repeated to the shape of `like`, whose values are not read: the vjp of sum.
Tensor expand_like(const Tensor& x, const Tensor& like);

void register_reduce_ops(OpRegistry& registry);

}  // namespace tessera
