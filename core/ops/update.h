// In-place updates, all built on assign. Autograd records the functions from assign_ to zero_:
// afterwards, every tensor that shares the memory of the destination has the gradient of the new
// values. Outside of NoGrad they throw UserError for a leaf that requires grad; optimizer steps run
// in NoGrad.
#pragma once
#include "core/ops/scalar.h"
#include "core/ops/update_attributes.h"
#include "core/primitive/registry.h"

namespace tessera {

/// dst takes the values of src (same shape; broadcast and cast where needed).
void assign_(const Tensor& dst, const Tensor& src);
/// dst op= operand. Refused where the result's dtype is of a higher category than dst's (an
/// integer tensor times a real number), as in PyTorch.
void add_(const Tensor& dst, const Tensor& src);
void sub_(const Tensor& dst, const Tensor& src);
void mul_(const Tensor& dst, const Tensor& factor);
void div_(const Tensor& dst, const Tensor& divisor);
void add_(const Tensor& dst, Scalar value);
void sub_(const Tensor& dst, Scalar value);
void mul_(const Tensor& dst, Scalar factor);
void div_(const Tensor& dst, Scalar divisor);
void clamp_(const Tensor& dst, Scalar low, Scalar high);
void fill_(const Tensor& dst, Scalar value);
void zero_(const Tensor& dst);

/// One Adam step of many tensors in one kernel. params, grads, m, v: lists of equal length and
/// shapes. `lr` and `step` (the number of this step, from 1) are 0-d f64 tensors, so that a trace
/// does not freeze them. `scale` (0-d f64, may be undefined) multiplies every gradient first, so
/// clipping and loss scaling need no pass of their own.
void adam_update_(std::span<const Tensor> params, std::span<const Tensor> grads,
                  std::span<const Tensor> m, std::span<const Tensor> v, const Tensor& lr,
                  const Tensor& step, const Tensor& scale, AdamUpdate options);

/// One SGD step of many tensors. `buffers` (momentum) may be empty when momentum is 0.
void sgd_update_(std::span<const Tensor> params, std::span<const Tensor> grads,
                 std::span<const Tensor> buffers, const Tensor& lr, const Tensor& scale,
                 SgdUpdate options);

/// sqrt(sum over all tensors of the sum of squares), 0-d of the widest dtype. Sums the rows (dim 0)
/// of each tensor first, then adds rows and tensors in a fixed tree.
Tensor global_norm(std::span<const Tensor> tensors);
/// global_norm in two halves, with equal bits: the sums of squares of the rows of x [R, ..], f64
/// [R] (a 0-d x is one row), and the norm, 0-d f64, from those of all tensors.
Tensor row_squares(const Tensor& x);
Tensor norm_of_rows(std::span<const Tensor> rows);

/// The largest magnitude of any element, 0-d f64; 0 of no elements.
Tensor max_magnitude(std::span<const Tensor> tensors);

void register_update_ops(OpRegistry& registry);

}  // namespace tessera
