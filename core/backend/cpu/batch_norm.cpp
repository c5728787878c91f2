// Batch-norm on the CPU: x is rows of channels. Moments are taken of pieces of rows that stay in
// the nearest caches, twice over each (the mean, then deviations from it), and pieces meet in f64:
// x is read once from memory, and no sum of squares cancels (Chan, Golub, LeVeque 1983). Invariant:
// pieces depend on the shape alone, so bits do not depend on the number of threads.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/backend/cpu/channels_last.h"
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/base/parallel.h"
#include "core/ops/batch_norm_attributes.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kPieceElements = 16384, kMostRows = 512;

template <class T>
const ChannelFns<T>& fns() {
  if constexpr (sizeof(T) == 4)
    return simd<ChannelTable>().f32;
  else
    return simd<ChannelTable>().f64;
}

// The rows of x, in pieces.
struct Pieces {
  int64_t channels, rows, each, count;
  explicit Pieces(const Shape& x) : channels(x[1]), rows(numel(x) / std::max<int64_t>(x[1], 1)) {
    each = std::clamp<int64_t>(kPieceElements / std::max<int64_t>(channels, 1), 8, kMostRows);
    count = (rows + each - 1) / each;
  }
  int64_t size(int64_t piece) const { return std::min(each, rows - piece * each); }
  // Calls f(piece, its first element, its rows), in parallel.
  template <class F>
  void run(F f) const {
    parallel_for(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) f(p, p * each * channels, size(p));
    });
  }
};

template <class T>
using Values = std::vector<T>;
// An operand [C] in T.
template <class T>
Tensor channel(const Tensor& t) {
  Tensor wide = converted(t, dtype_of<T>);
  return wide.is_contiguous() ? wide : dense_copy(wide);
}

// Mean and variance of each channel from those of pieces.
template <class T>
void join_moments(const Pieces& p, const Values<T>& means, const Values<T>& deviations, T* mean,
                  T* var) {
  for (int64_t c = 0; c < p.channels; ++c) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < p.count; ++i)
      sum += double(means[size_t(i * p.channels + c)]) * double(p.size(i));
    const double centre = sum / double(p.rows);
    for (int64_t i = 0; i < p.count; ++i) {
      const double d = double(means[size_t(i * p.channels + c)]) - centre;
      squares += double(deviations[size_t(i * p.channels + c)]) + d * d * double(p.size(i));
    }
    mean[c] = T(centre), var[c] = T(squares / double(p.rows));
  }
}

void plan_batch_norm(const Primitive&, std::span<const Tensor>, std::span<Meta> out, Plan&) {
  out[0].strides = channels_last_strides(out[0].shape);
}

// Both operands are read whole before the first row of dx is written, those of a channel before
// its sums are.
void plan_batch_norm_grad(const Primitive&, std::span<const Tensor>, std::span<Meta> out,
                          Plan& plan) {
  out[0].strides = channels_last_strides(out[0].shape);
  plan.in_place = true;
}

template <class T>
void forward(const BatchNormAttributes& a, std::span<const Tensor> in, const Tensor& y,
             const Tensor& mean, const Tensor& var) {
  const Tensor x = channels_last_wide(in[0]);
  const Pieces p(x.shape());
  const T* from = x.values<T>();
  Values<T> means(size_t(p.count * p.channels)), deviations(means.size());
  p.run([&](int64_t i, int64_t at, int64_t rows) {
    fns<T>().moments(from + at, rows, p.channels, &means[size_t(i * p.channels)],
                     &deviations[size_t(i * p.channels)]);
  });
  T *centre = mean.data<T>(), *variance = var.data<T>();
  join_moments(p, means, deviations, centre, variance);

  Values<T> scale(size_t(p.channels), T(1)), shift(size_t(p.channels), T(0));
  if (a.has_weight) std::copy_n(channel<T>(in[1]).template values<T>(), p.channels, scale.data());
  if (a.has_bias)
    std::copy_n(channel<T>(in[a.has_weight ? 2 : 1]).template values<T>(), p.channels,
                shift.data());
  for (int64_t c = 0; c < p.channels; ++c)
    scale[size_t(c)] *= T(1 / std::sqrt(double(variance[c]) + a.eps));
  T* to = y.data<T>();
  p.run([&](int64_t, int64_t at, int64_t rows) {
    fns<T>().normalize(from + at, centre, scale.data(), shift.data(), to + at, rows, p.channels);
  });
}

void run_batch_norm(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                    Workspace, const Stream&) {
  const auto& a = static_cast<const BatchNormAttributes&>(prim);
  if (in[0].numel() == 0) {  // the moments of nothing
    for (const Tensor* t : {&out[1], &out[2]})
      std::fill_n(static_cast<char*>(t->raw()), t->nbytes(), char(0));
    return;
  }
  const WideResult y(out[0]);
  if (in[0].dtype() == kF64)
    forward<double>(a, in, y.get(), out[1], out[2]);
  else
    forward<float>(a, in, y.get(), out[1], out[2]);
  y.finish();
}

// With h = (x - mean) rstd: db = sum(g), dw = sum(g h), dx = w rstd (g - db / n - h dw / n).
template <class T>
void backward(const BatchNormAttributes& a, std::span<const Tensor> in, const Tensor& dx,
              std::span<const Tensor> sums) {
  const Tensor g = channels_last_wide(in[0]), x = channels_last_wide(in[1]),
               mean = channel<T>(in[2]), var = channel<T>(in[3]);
  const Pieces p(x.shape());
  const T *from = x.values<T>(), *cot = g.values<T>(), *centre = mean.values<T>();
  Values<T> partial(size_t(p.count * p.channels)), products(partial.size());
  p.run([&](int64_t i, int64_t at, int64_t rows) {
    fns<T>().grad_sums(cot + at, from + at, centre, &partial[size_t(i * p.channels)],
                       &products[size_t(i * p.channels)], rows, p.channels);
  });
  const size_t channels = size_t(p.channels);
  Values<T> mean_g(channels), slope(channels), scale(channels, T(1)), dw(channels), db(channels);
  if (a.has_weight) std::copy_n(channel<T>(in[4]).template values<T>(), p.channels, scale.data());
  const double n = double(p.rows);
  for (size_t c = 0; c < channels; ++c) {
    double sum = 0, product = 0;
    for (size_t i = 0; i < size_t(p.count); ++i)
      sum += double(partial[i * channels + c]), product += double(products[i * channels + c]);
    const double rstd = 1 / std::sqrt(double(var.values<T>()[c]) + a.eps);
    db[c] = T(sum), dw[c] = T(product * rstd);
    mean_g[c] = T(sum / n), slope[c] = T(product * rstd * rstd / n), scale[c] *= T(rstd);
  }
  T* to = dx.data<T>();
  p.run([&](int64_t, int64_t at, int64_t rows) {
    fns<T>().grad(cot + at, from + at, centre, mean_g.data(), slope.data(), scale.data(), to + at,
                  rows, p.channels);
  });
  size_t next = 0;
  auto give = [&](Values<T>& values) {
    const Tensor& to = sums[next++];
    Tensor t = empty(to.shape(), dtype_of<T>);
    std::copy_n(values.data(), p.channels, t.template data<T>());
    convert_into(t, to);
  };
  if (a.has_weight) give(dw);
  if (a.has_bias) give(db);
}

void run_batch_norm_grad(const Primitive& prim, std::span<const Tensor> in,
                         std::span<const Tensor> out, Workspace, const Stream&) {
  const auto& a = static_cast<const BatchNormAttributes&>(prim);
  if (in[1].numel() == 0) {
    for (const Tensor& t : out.subspan(1))
      std::fill_n(static_cast<char*>(t.raw()), t.nbytes(), char(0));
    return;
  }
  const WideResult dx(out[0]);
  if (in[1].dtype() == kF64)
    backward<double>(a, in, dx.get(), out.subspan(1));
  else
    backward<float>(a, in, dx.get(), out.subspan(1));
  dx.finish();
}

}  // namespace

void register_batch_norm(KernelTable& t) {
  t.add(DeviceKind::kCPU, "batch_norm", {plan_batch_norm, run_batch_norm});
  t.add(DeviceKind::kCPU, "batch_norm_grad", {plan_batch_norm_grad, run_batch_norm_grad});
}

}  // namespace tessera::cpu
