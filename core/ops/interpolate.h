// Images of another size. Names, defaults and semantics are PyTorch's.
#pragma once
#include "core/ops/conv.h"

namespace tessera {

/// kLinear is linear, bilinear or trilinear, by the number of spatial dims. With `size`, kNearest
/// takes place floor(i in / out), computed in integers; PyTorch computes it in f32, and at rare
/// ratios takes the place before.
enum class Interpolation : uint8_t { kNearest, kLinear };
struct InterpolateOptions {
  std::optional<PerDim> size = {};        // the new spatial extents, or
  std::vector<double> scale_factor = {};  // what each is multiplied by: one number, or one for each
  Interpolation mode = Interpolation::kNearest;
  bool align_corners = false;  // kLinear: the outermost places of input and result coincide
};
/// x [N, C, ..] with one to three spatial dims.
Tensor interpolate(const Tensor& x, const InterpolateOptions& options);

}  // namespace tessera
