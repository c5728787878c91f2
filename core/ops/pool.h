// Pooling over one, two or three spatial dims. Names, defaults and semantics are PyTorch's. x [N,
// C, ..] or [C, ..]; the `d` in a name is the number of spatial dims. Results are laid out
// channels-last, as those of convolutions.
#pragma once
#include <utility>

#include "core/ops/conv.h"

namespace tessera {

struct MaxPoolOptions {
  PerDim stride = 0;   // 0: the kernel's extents
  PerDim padding = 0;  // with values below any other; at most half of the kernel
  PerDim dilation = 1;
  bool ceil_mode = false;  // a last window may reach beyond the end
};
/// The largest value of each window; NaN wins. The gradient goes to the first of equal values.
Tensor max_pool1d(const Tensor& x, PerDim kernel, const MaxPoolOptions& options = {});
Tensor max_pool2d(const Tensor& x, PerDim kernel, const MaxPoolOptions& options = {});
Tensor max_pool3d(const Tensor& x, PerDim kernel, const MaxPoolOptions& options = {});
/// The same, and where each value was: i64, its position in the flattened spatial dims of x.
std::pair<Tensor, Tensor> max_pool_with_indices(const Tensor& x, PerDim kernel, int spatial_dims,
                                                const MaxPoolOptions& options = {});

struct AvgPoolOptions {
  PerDim stride = 0;   // 0: the kernel's extents
  PerDim padding = 0;  // with zeros; at most half of the kernel
  bool ceil_mode = false;
  bool count_include_pad = true;
  int64_t divisor_override = 0;  // 0: the number of places
};
Tensor avg_pool1d(const Tensor& x, PerDim kernel, const AvgPoolOptions& options = {});
Tensor avg_pool2d(const Tensor& x, PerDim kernel, const AvgPoolOptions& options = {});
Tensor avg_pool3d(const Tensor& x, PerDim kernel, const AvgPoolOptions& options = {});

/// Divides each spatial dim into `output` windows; -1 keeps an extent.
Tensor adaptive_avg_pool1d(const Tensor& x, PerDim output);
Tensor adaptive_avg_pool2d(const Tensor& x, PerDim output);
Tensor adaptive_avg_pool3d(const Tensor& x, PerDim output);
Tensor adaptive_max_pool1d(const Tensor& x, PerDim output);
Tensor adaptive_max_pool2d(const Tensor& x, PerDim output);
Tensor adaptive_max_pool3d(const Tensor& x, PerDim output);

}  // namespace tessera
