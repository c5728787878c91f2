// One nest for the three ops: threads share the loops of the result, each walks the summed loop,
// and for every place of the kernel the places of the output that it meets inside of x. Fewer than
// three spatial dims get leading ones of extent 1.
#include "core/backend/cpu/conv/nest.h"

#include <algorithm>

#include "core/base/boundary.h"

namespace tessera::cpu {
namespace {

// Extents and strides of one spatial dim.
struct SpatialDim {
  int64_t x = 1, k = 1, o = 1, stride = 1, dilation = 1, pad = 0, x_step = 0, w_step = 0,
          y_step = 0;
  // Places of the output that place `at` of the kernel meets inside of x.
  std::pair<int64_t, int64_t> met(int64_t at) const {
    int64_t shift = pad - at * dilation;  // o stride >= shift, o stride < x + shift
    int64_t first = shift <= 0 ? 0 : (shift + stride - 1) / stride,
            end = x + shift <= 0 ? 0 : (x + shift - 1) / stride + 1;
    return {first, std::min(end, o)};
  }
  int64_t place(int64_t o, int64_t at) const { return o * stride - pad + at * dilation; }
};

template <class T>
struct ConvNest {
  ConvRole role;
  SpatialDim dims[3];
  int64_t extent[4];                                       // n, g, co, ci
  int64_t x_step[4] = {}, w_step[4] = {}, y_step[4] = {};  // of the same loops
  T *x, *w, *y;

  // One batch element, group and pair of channels.
  void plane(T* xp, T* wp, T* yp) const {
    const auto& [a, b, c] = dims;
    for (int64_t i = 0; i < a.k; ++i)
      for (int64_t j = 0; j < b.k; ++j)
        for (int64_t k = 0; k < c.k; ++k)
          at_kernel_place(i, j, k, xp, wp[i * a.w_step + j * b.w_step + k * c.w_step], yp);
  }
  void at_kernel_place(int64_t i, int64_t j, int64_t k, T* xp, T& weight, T* yp) const {
    const auto& [a, b, c] = dims;
    auto [a0, a1] = a.met(i);
    auto [b0, b1] = b.met(j);
    auto [c0, c1] = c.met(k);
    T sum = 0;
    for (int64_t p = a0; p < a1; ++p)
      for (int64_t q = b0; q < b1; ++q) {
        T* xr = xp + a.place(p, i) * a.x_step + b.place(q, j) * b.x_step + c.place(0, k) * c.x_step;
        T* yr = yp + p * a.y_step + q * b.y_step;
        const int64_t xs = c.stride * c.x_step, ys = c.y_step;
        if (role == ConvRole::kOutput)
          for (int64_t r = c0; r < c1; ++r) yr[r * ys] += weight * xr[r * xs];
        else if (role == ConvRole::kInput)
          for (int64_t r = c0; r < c1; ++r) xr[r * xs] += weight * yr[r * ys];
        else
          for (int64_t r = c0; r < c1; ++r) sum += yr[r * ys] * xr[r * xs];
      }
    if (role == ConvRole::kWeight) weight += sum;
  }

  void run() const {
    const int summed = role == ConvRole::kOutput ? 3 : role == ConvRole::kInput ? 2 : 0;
    int64_t units = 1;
    for (int l = 0; l < 4; ++l) units *= l == summed ? 1 : extent[l];
    parallel_for("conv_nest.threads", units, 1, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) {
        T *xp = x, *wp = w, *yp = y;
        int64_t rest = unit;
        for (int l = 3; l >= 0; --l) {
          if (l == summed) continue;
          int64_t at = rest % extent[l];
          rest /= extent[l];
          xp += at * x_step[l], wp += at * w_step[l], yp += at * y_step[l];
        }
        for (int64_t s = 0; s < extent[summed]; ++s)
          plane(xp + s * x_step[summed], wp + s * w_step[summed], yp + s * y_step[summed]);
      }
    });
  }
};

template <class T>
void run(ConvRole role, const ConvAttributes::Window& window, const Tensor& x, const Tensor& w,
         const Tensor& y) {
  ConvNest<T> nest;
  nest.role = role;
  const Tensor& out = role == ConvRole::kOutput ? y : role == ConvRole::kInput ? x : w;
  std::fill_n(out.data<T>(), out.numel(), T(0));
  auto values = [](const Tensor& t) { return const_cast<T*>(t.values<T>()); };
  nest.x = values(x), nest.w = values(w), nest.y = values(y);
  const int64_t groups = window.groups, co = w.shape()[0] / groups, ci = w.shape()[1];
  const Strides &xs = x.strides(), &ws = w.strides(), &ys = y.strides();
  const int64_t extents[] = {x.shape()[0], groups, co, ci};
  const int64_t x_steps[] = {xs[0], ci * xs[1], 0, xs[1]},
                w_steps[] = {0, co * ws[0], ws[0], ws[1]},
                y_steps[] = {ys[0], co * ys[1], ys[1], 0};
  std::copy_n(extents, 4, nest.extent);
  std::copy_n(x_steps, 4, nest.x_step), std::copy_n(w_steps, 4, nest.w_step),
      std::copy_n(y_steps, 4, nest.y_step);
  const int n = window.stride.size();
  for (int i = 0; i < n; ++i)
    nest.dims[3 - n + i] = {x.shape()[i + 2], w.shape()[i + 2],   y.shape()[i + 2],
                            window.stride[i], window.dilation[i], window.pad_begin[i],
                            xs[i + 2],        ws[i + 2],          ys[i + 2]};
  nest.run();
}

}  // namespace

void run_conv_nest(ConvRole role, const ConvAttributes::Window& window, const Tensor& x,
                   const Tensor& w, const Tensor& y) {
  if (x.dtype() == kF64) return run<double>(role, window, x, w, y);
  run<float>(role, window, x, w, y);
}

}  // namespace tessera::cpu
