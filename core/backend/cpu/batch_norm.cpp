// Batch-norm on the CPU: x is rows of channels, in pieces of rows. Forward reads x twice: moments
// of pieces, deviations being from a mean of their own, meet in f64 (Chan, Golub, LeVeque 1983),
// then rows are normalised, the residual added and the relu taken in one go; backward reads its
// operands twice likewise. The second walk goes from the last piece to the first, which finds in
// the caches what the first walk read last. bf16 is widened in registers, f16 as whole tensors.
// Invariant: pieces depend on the shape alone, so bits do not depend on the number of threads.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/backend/cpu/channels_last.h"
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/batch_norm_table.h"
#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/base/parallel.h"
#include "core/ops/batch_norm_attributes.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kPieceElements = 65536, kMostRows = 512;

template <class E>
const auto& fns() {
  const BatchNormTable& table = simd<BatchNormTable>();
  if constexpr (std::is_same_v<E, float>)
    return table.f32;
  else if constexpr (std::is_same_v<E, double>)
    return table.f64;
  else
    return table.bf16;
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
  // The same from the last piece to the first: f(first element, rows).
  template <class F>
  void run_back(F f) const {
    parallel_for(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t p = count - 1 - begin; p >= count - end; --p) f(p * each * channels, size(p));
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

// What pieces have for each channel, summed: f(piece, value) of values [pieces, channels].
template <class T, class F>
Values<double> total(const Pieces& p, const Values<T>& values, F f) {
  Values<double> sum(size_t(p.channels), 0.0);
  for (int64_t i = 0; i < p.count; ++i) {
    const T* of = &values[size_t(i * p.channels)];
    const double rows = double(p.size(i));
    for (int64_t c = 0; c < p.channels; ++c) sum[size_t(c)] += f(double(of[c]), rows, c);
  }
  return sum;
}

// Mean and variance of each channel from those of pieces.
template <class T>
void join_moments(const Pieces& p, const Values<T>& means, const Values<T>& deviations, T* mean,
                  T* var) {
  const double share = 1 / double(p.rows);
  const Values<double> sum =
      total(p, means, [](double m, double rows, int64_t) { return m * rows; });
  const Values<double> within = total(p, deviations, [](double d, double, int64_t) { return d; });
  const Values<double> between = total(p, means, [&](double m, double rows, int64_t c) {
    const double d = m - sum[size_t(c)] * share;
    return d * d * rows;
  });
  for (size_t c = 0; c < sum.size(); ++c)
    mean[c] = T(sum[c] * share), var[c] = T((within[c] + between[c]) * share);
}

// Elements of a tensor of this dtype, as kernels see them.
template <class E>
E* elements(const Tensor& t) {
  return static_cast<E*>(t.raw());
}
template <class E>
const E* element_values(const Tensor& t) {
  return static_cast<const E*>(t.raw_values());
}

void plan_batch_norm(const Primitive&, std::span<const Tensor>, std::span<Meta> out, Plan&) {
  out[0].strides = channels_last_strides(out[0].shape);
}

// All operands are read whole before the first row of dx is written, and then again a chunk of a
// row before the same chunk of the results is; those of a channel are before its sums are.
void plan_batch_norm_grad(const Primitive& prim, std::span<const Tensor>, std::span<Meta> out,
                          Plan& plan) {
  const bool residual = static_cast<const BatchNormAttributes&>(prim).form.residual;
  for (int i = 0; i < (residual ? 2 : 1); ++i)
    out[size_t(i)].strides = channels_last_strides(out[size_t(i)].shape);
  plan.in_place = true;
}

// Operands in the dtype of E, channels-last.
template <class E>
Tensor as_rows(const Tensor& t) {
  return std::is_same_v<E, BrainFloat> ? as_channels_last(t) : channels_last_wide(t);
}

template <class E, class T>
void forward(const BatchNormAttributes& a, std::span<const Tensor> in, const Tensor& y,
             const Tensor& mean, const Tensor& var) {
  const Tensor x = as_rows<E>(in[0]), residual = a.form.residual ? as_rows<E>(in.back()) : Tensor();
  const Pieces p(x.shape());
  const E* from = element_values<E>(x);
  const E* added = residual.defined() ? element_values<E>(residual) : nullptr;
  Values<T> means(size_t(p.count * p.channels)), deviations(means.size()), centres(means.size());
  p.run([&](int64_t i, int64_t at, int64_t rows) {
    const size_t first = size_t(i * p.channels);
    fns<E>().moments(from + at, rows, p.channels, &centres[first], &means[first],
                     &deviations[first]);
  });
  T *centre = mean.data<T>(), *variance = var.data<T>();
  join_moments(p, means, deviations, centre, variance);

  Values<T> scale(size_t(p.channels), T(1)), shift(size_t(p.channels), T(0));
  if (a.form.weight) std::copy_n(channel<T>(in[1]).template values<T>(), p.channels, scale.data());
  if (a.form.bias)
    std::copy_n(channel<T>(in[a.form.weight ? 2 : 1]).template values<T>(), p.channels,
                shift.data());
  for (int64_t c = 0; c < p.channels; ++c)
    scale[size_t(c)] *= T(1 / std::sqrt(double(variance[c]) + a.eps));
  E* to = elements<E>(y);
  p.run_back([&](int64_t at, int64_t rows) {
    fns<E>().normalize(from + at, added ? added + at : nullptr, a.form.relu, centre, scale.data(),
                       shift.data(), to + at, rows, p.channels);
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
  if (in[0].dtype() == kBF16) return forward<BrainFloat, float>(a, in, out[0], out[1], out[2]);
  const WideResult y(out[0]);
  if (in[0].dtype() == kF64)
    forward<double, double>(a, in, y.get(), out[1], out[2]);
  else
    forward<float, float>(a, in, y.get(), out[1], out[2]);
  y.finish();
}

// With h = (x - mean) rstd: db = sum(g), dw = sum(g h), dx = w rstd (g - db / n - h dw / n), where
// g counts at positive y if there was a relu. `dresidual` may be undefined.
template <class E, class T>
void backward(const BatchNormAttributes& a, std::span<const Tensor> in, const Tensor& dx,
              const Tensor& dresidual, std::span<const Tensor> sums) {
  const Tensor g = as_rows<E>(in[0]), x = as_rows<E>(in[1]), mean = channel<T>(in[2]),
               var = channel<T>(in[3]), y = a.form.relu ? as_rows<E>(in.back()) : Tensor();
  const Pieces p(x.shape());
  const E *from = element_values<E>(x), *cot = element_values<E>(g);
  const E* result = y.defined() ? element_values<E>(y) : nullptr;
  const T* centre = mean.values<T>();
  Values<T> partial(size_t(p.count * p.channels)), products(partial.size());
  p.run([&](int64_t i, int64_t at, int64_t rows) {
    fns<E>().grad_sums(cot + at, from + at, result ? result + at : nullptr, centre,
                       &partial[size_t(i * p.channels)], &products[size_t(i * p.channels)], rows,
                       p.channels);
  });
  auto value = [](double v, double, int64_t) { return v; };
  const Values<double> sum = total(p, partial, value), product = total(p, products, value);
  const size_t channels = size_t(p.channels);
  Values<T> mean_g(channels), slope(channels), scale(channels, T(1)), dw(channels), db(channels);
  if (a.form.weight) std::copy_n(channel<T>(in[4]).template values<T>(), p.channels, scale.data());
  const double n = double(p.rows);
  for (size_t c = 0; c < channels; ++c) {
    const double rstd = 1 / std::sqrt(double(var.values<T>()[c]) + a.eps);
    db[c] = T(sum[c]), dw[c] = T(product[c] * rstd);
    mean_g[c] = T(sum[c] / n), slope[c] = T(product[c] * rstd * rstd / n), scale[c] *= T(rstd);
  }
  E* to = elements<E>(dx);
  E* kept = dresidual.defined() ? elements<E>(dresidual) : nullptr;
  p.run_back([&](int64_t at, int64_t rows) {
    fns<E>().grad(cot + at, from + at, result ? result + at : nullptr, centre, mean_g.data(),
                  slope.data(), scale.data(), to + at, kept ? kept + at : nullptr, rows,
                  p.channels);
  });
  size_t next = 0;
  auto give = [&](Values<T>& values) {
    const Tensor& to = sums[next++];
    Tensor t = empty(to.shape(), dtype_of<T>);
    std::copy_n(values.data(), p.channels, t.template data<T>());
    convert_into(t, to);
  };
  if (a.form.weight) give(dw);
  if (a.form.bias) give(db);
}

void run_batch_norm_grad(const Primitive& prim, std::span<const Tensor> in,
                         std::span<const Tensor> out, Workspace, const Stream&) {
  const auto& a = static_cast<const BatchNormAttributes&>(prim);
  const std::span<const Tensor> sums = out.subspan(a.form.residual ? 2 : 1);
  if (in[1].numel() == 0) {
    for (const Tensor& t : sums) std::fill_n(static_cast<char*>(t.raw()), t.nbytes(), char(0));
    return;
  }
  const Tensor dresidual = a.form.residual ? out[1] : Tensor();
  if (in[1].dtype() == kBF16) return backward<BrainFloat, float>(a, in, out[0], dresidual, sums);
  const WideResult dx(out[0]), kept(dresidual);
  if (in[1].dtype() == kF64)
    backward<double, double>(a, in, dx.get(), kept.get(), sums);
  else
    backward<float, float>(a, in, dx.get(), kept.get(), sums);
  dx.finish(), kept.finish();
}

}  // namespace

void register_batch_norm(KernelTable& t) {
  t.add(DeviceKind::kCPU, "batch_norm", {plan_batch_norm, run_batch_norm});
  t.add(DeviceKind::kCPU, "batch_norm_grad", {plan_batch_norm_grad, run_batch_norm_grad});
}

}  // namespace tessera::cpu
