// Images [N, C, spatial..] of one to three spatial dims, as the kernels of convolutions and pools
// see them: always three, of which the missing ones come first and have one place.
#pragma once
#include "core/backend/cuda/kernels/parameters.h"
#include "core/backend/cuda/ops/pointwise.h"

namespace tessera::cuda {

inline PoolStrides strides_of(const Tensor& t) {
  PoolStrides s{t.strides()[0], t.strides()[1], {0, 0, 0}};
  const int missing = 5 - t.ndim();
  for (int d = 2; d < t.ndim(); ++d) s.dim[missing + d - 2] = t.strides()[d];
  return s;
}

/// `t`, or a copy whose channels are neighbours.
inline Tensor channels_last(const Tensor& t, const Stream& stream) {
  if (is_channels_last(t.shape(), t.strides())) return t;
  const Tensor copy =
      empty(Meta{t.shape(), channels_last_strides(t.shape()), t.dtype(), t.device()});
  convert(t, copy, stream);
  return copy;
}

}  // namespace tessera::cuda
