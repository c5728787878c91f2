// Separable: each spatial dim is a selection of its places (nearest), or a weighted sum of two
// (linear), so derivatives and sharding are those of index_select.
#include "core/ops/interpolate.h"

#include <cmath>
#include <vector>

#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"
#include "core/ops/windows.h"

namespace tessera {
namespace {

// One spatial dim: its new extent, and the step in the old one that a step in the new one is.
struct Axis {
  int64_t in, out;
  double step;
  double factor = 0;  // how much longer it was asked to be; 0: `out` was given
};

Axis axis_of(const Tensor& x, int i, int dims, const InterpolateOptions& o) {
  const int64_t in = x.shape()[i + 2];
  Axis a{in, 0, 0};
  if (o.size) {
    a.out = o.size->expand(dims, 1, "interpolate", "size")[i];
    a.step = double(in) / double(a.out);
  } else {
    const double factor = o.scale_factor[o.scale_factor.size() == 1 ? 0 : size_t(i)];
    TESSERA_CHECK(factor > 0, "interpolate: scale_factor {} must be positive", factor);
    const double out = std::floor(double(in) * factor);
    TESSERA_CHECK_AS(ShapeError, out > 0, "interpolate: scale_factor {} leaves nothing of {}",
                     factor, to_string(x.shape()));
    TESSERA_CHECK_AS(ShapeError, out <= double(windows::kMost),
                     "interpolate: scale_factor {} makes {} of {}; extents end at {}", factor, out,
                     to_string(x.shape()), windows::kMost);
    a.out = int64_t(out);
    a.step = 1 / factor, a.factor = factor;
  }
  if (o.align_corners) a.step = a.out > 1 ? double(in - 1) / double(a.out - 1) : 0;
  return a;
}

Tensor select_places(const Tensor& x, int dim, const std::vector<int64_t>& at) {
  return index_select(x, dim, from_values<int64_t>(at, {int64_t(at.size())}));
}

Tensor nearest(const Tensor& x, int dim, const Axis& a) {
  std::vector<int64_t> at;
  for (int64_t i = 0; i < a.out; ++i)
    // A quotient is exact where the factor is a whole number; i times the step may fall short.
    at.push_back(a.factor == 0 ? i * a.in / a.out
                               : std::min(int64_t(std::floor(double(i) / a.factor)), a.in - 1));
  return select_places(x, dim, at);
}

Tensor linear_between(const Tensor& x, int dim, const Axis& a, bool align_corners) {
  std::vector<int64_t> low, high;
  std::vector<double> weight;
  for (int64_t i = 0; i < a.out; ++i) {
    double at =
        align_corners ? double(i) * a.step : std::max(0.0, (double(i) + 0.5) * a.step - 0.5);
    int64_t first = std::min(int64_t(at), a.in - 1);
    low.push_back(first), high.push_back(std::min(first + 1, a.in - 1));
    weight.push_back(at - double(first));
  }
  Shape beside = Dims::filled(x.ndim() - dim, 1);
  beside[0] = a.out;
  Tensor w = reshape(cast(from_values<double>(weight, {a.out}), x.dtype()), beside);
  return select_places(x, dim, low) * (1.0 - w) + select_places(x, dim, high) * w;
}

}  // namespace

Tensor interpolate(const Tensor& x, const InterpolateOptions& o) {
  const int dims = x.ndim() - 2;
  TESSERA_CHECK_AS(ShapeError, dims >= 1 && dims <= 3,
                   "interpolate: x is {}; expected [N, C, ..] with 1 to 3 spatial dims",
                   describe(x));
  for (int i = 2; i < x.ndim(); ++i)
    TESSERA_CHECK_AS(ShapeError, x.size(i) > 0,
                     "interpolate: x is {}; spatial extents must be positive", describe(x));
  TESSERA_CHECK(o.size.has_value() == o.scale_factor.empty(),
                "interpolate: give either size or scale_factor");
  TESSERA_CHECK_AS(
      ShapeError, o.size || o.scale_factor.size() == 1 || int(o.scale_factor.size()) == dims,
      "interpolate: {} scale factors for {} spatial dims", o.scale_factor.size(), dims);
  const bool smooth = o.mode == Interpolation::kLinear;
  TESSERA_CHECK(smooth || !o.align_corners,
                "interpolate: align_corners means nothing for the nearest place");
  TESSERA_CHECK(!smooth || is_floating(x.dtype()), "interpolate: x is {}; expected floats",
                describe(x));
  // Weights and sums of 16-bit floats are f32, rounded once.
  const bool narrow = smooth && size_of(x.dtype()) == 2;
  Tensor y = narrow ? cast(x, kF32) : x;
  std::vector<Axis> axes;
  Shape result = x.shape();
  for (int i = 0; i < dims; ++i) {
    axes.push_back(axis_of(x, i, dims, o));
    result[i + 2] = axes.back().out;
  }
  empty(result, y.dtype(), kMeta);  // refuses what no memory holds, before places are listed
  for (int i = 0; i < dims; ++i) {
    const Axis& a = axes[size_t(i)];
    if (a.out == a.in && a.step == 1) continue;
    y = smooth ? linear_between(y, i + 2, a, o.align_corners) : nearest(y, i + 2, a);
  }
  return narrow ? cast(y, x.dtype()) : y;
}

}  // namespace tessera
