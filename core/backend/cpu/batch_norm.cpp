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
#include "core/base/boundary.h"
#include "core/ops/batch_norm_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kPieceElements = 65536, kMostRows = limit("batch_norm.rows");

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
    meet("batch_norm.block", rows);
    if (each == kMostRows)
      meet("batch_norm.rows", rows);
    else
      meet("batch_norm.piece", rows, each);
  }
  int64_t size(int64_t piece) const { return std::min(each, rows - piece * each); }
  // Calls f(piece, its first element, its rows), in parallel.
  template <class F>
  void run(F f) const {
    parallel_for("batch_norm.threads", count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) f(p, p * each * channels, size(p));
    });
  }
  // The same from the last piece to the first: f(first element, rows).
  template <class F>
  void run_back(F f) const {
    parallel_for("batch_norm.threads", count, 1, [&](int64_t begin, int64_t end) {
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

// Values of channels in the order of the second walk.
template <class E, class T>
Values<T> arranged(const T* values, const Pieces& p) {
  Values<T> to(static_cast<size_t>(p.channels));
  fns<E>().arrange(values, to.data(), p.channels);
  return to;
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

void plan_apply(const Primitive&, std::span<const Tensor>, std::span<Meta> out, Plan& plan) {
  out[0].strides = channels_last_strides(out[0].shape);
  plan.in_place = true;  // a chunk of a row is read before the same chunk of the result is written
}

// All operands are read whole before the first row of dx is written, and then again a chunk of a
// row before the same chunk of the results is; those of a channel are before its sums are.
void plan_batch_norm_grad(const Primitive& prim, std::span<const Tensor>, std::span<Meta> out,
                          Plan& plan) {
  const bool residual = attributes_of<BatchNormAttributes>(prim).form.residual;
  for (int i = 0; i < (residual ? 2 : 1); ++i)
    out[size_t(i)].strides = channels_last_strides(out[size_t(i)].shape);
  plan.in_place = true;
}

// Operands in the dtype of E, channels-last.
template <class E>
Tensor as_rows(const Tensor& t) {
  return std::is_same_v<E, BrainFloat> ? as_channels_last(t) : channels_last_wide(t);
}

// Calls f.operator()<E, T>() for the elements and the arithmetic of a dtype.
template <class F>
void with_types(DType t, F f) {
  if (t == kBF16) return f.template operator()<BrainFloat, float>();
  if (t == kF64) return f.template operator()<double, double>();
  f.template operator()<float, float>();
}

// What is written as E: `out` itself where its elements are, else a wider tensor until finish().
template <class E>
class ResultIn {
 public:
  explicit ResultIn(const Tensor& out) : out_(out), wide_(kDirect ? none_ : out) {}
  const Tensor& get() const { return kDirect ? out_ : wide_.get(); }
  void finish() const { wide_.finish(); }

 private:
  static constexpr bool kDirect = std::is_same_v<E, BrainFloat>;
  const Tensor none_;
  const Tensor& out_;
  const WideResult wide_;
};

// Mean and variance of the channels of x.
template <class E, class T>
void moments(const Pieces& p, const E* x, T* mean, T* var) {
  Values<T> means(size_t(p.count * p.channels)), deviations(means.size()), centres(means.size());
  p.run([&](int64_t i, int64_t at, int64_t rows) {
    const size_t first = size_t(i * p.channels);
    fns<E>().moments(x + at, rows, p.channels, &centres[first], &means[first], &deviations[first]);
  });
  join_moments(p, means, deviations, mean, var);
}

// `beside`: weight, bias, residual where present.
template <class E, class T>
void normalize(const BatchNormAttributes& a, const Pieces& p, const E* x, const T* mean,
               const T* var, std::span<const Tensor> beside, E* y) {
  const Tensor residual = a.form.residual ? as_rows<E>(beside.back()) : Tensor();
  const E* added = residual.defined() ? element_values<E>(residual) : nullptr;
  Values<T> scale(size_t(p.channels), T(1)), shift(size_t(p.channels), T(0));
  if (a.form.weight)
    std::copy_n(channel<T>(beside[0]).template values<T>(), p.channels, scale.data());
  if (a.form.bias)
    std::copy_n(channel<T>(beside[a.form.weight ? 1 : 0]).template values<T>(), p.channels,
                shift.data());
  for (int64_t c = 0; c < p.channels; ++c)
    scale[size_t(c)] *= T(1 / std::sqrt(double(var[c]) + a.eps));
  const Values<T> means = arranged<E>(mean, p), scales = arranged<E>(scale.data(), p),
                  shifts = arranged<E>(shift.data(), p);
  p.run_back([&](int64_t at, int64_t rows) {
    fns<E>().normalize(x + at, added ? added + at : nullptr, a.form.relu, means.data(),
                       scales.data(), shifts.data(), y + at, rows, p.channels);
  });
}

template <class E, class T>
void forward(const BatchNormAttributes& a, std::span<const Tensor> in, const Tensor& y,
             const Tensor& mean, const Tensor& var) {
  const Tensor x = as_rows<E>(in[0]);
  const Pieces p(x.shape());
  moments(p, element_values<E>(x), mean.data<T>(), var.data<T>());
  normalize(a, p, element_values<E>(x), mean.values<T>(), var.values<T>(), in.subspan(1),
            elements<E>(y));
}

void zero(std::span<const Tensor> all) {
  for (const Tensor& t : all) std::fill_n(static_cast<char*>(t.raw()), t.nbytes(), char(0));
}

void run_batch_norm(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                    Workspace, const Stream&) {
  const auto& a = attributes_of<BatchNormAttributes>(prim);
  if (in[0].numel() == 0) return zero(out.subspan(1));  // the moments of nothing
  with_types(in[0].dtype(), [&]<class E, class T>() {
    const ResultIn<E> y(out[0]);
    forward<E, T>(a, in, y.get(), out[1], out[2]);
    y.finish();
  });
}

// The operands of the gradient that are as x; g counts at positive y if there was a relu.
template <class E>
struct GradRows {
  Tensor g, x, y;
  Pieces p;
  GradRows(const BatchNormAttributes& a, std::span<const Tensor> in)
      : g(as_rows<E>(in[0])),
        x(as_rows<E>(in[1])),
        y(a.form.relu ? as_rows<E>(in.back()) : Tensor()),
        p(x.shape()) {}
  const E* result(int64_t at) const { return y.defined() ? element_values<E>(y) + at : nullptr; }
};

// The sums of g and of g (x - centre).
template <class T>
struct GradSums {
  Values<double> g, product;
  template <class E>
  GradSums(const GradRows<E>& r, const T* centre) {
    const Pieces& p = r.p;
    const E *x = element_values<E>(r.x), *g_rows = element_values<E>(r.g);
    Values<T> partial(size_t(p.count * p.channels)), products(partial.size());
    p.run([&](int64_t i, int64_t at, int64_t rows) {
      const size_t first = size_t(i * p.channels);
      fns<E>().grad_sums(g_rows + at, x + at, r.result(at), centre, &partial[first],
                         &products[first], rows, p.channels);
    });
    auto value = [](double v, double, int64_t) { return v; };
    g = total(p, partial, value), product = total(p, products, value);
  }
};

// dx = (g - mean_g - (x - centre) slope) scale.
template <class E, class T>
void write_grad(const GradRows<E>& r, const T* centre, const T* mean_g, const T* slope,
                const T* scale, const Tensor& dx, const Tensor& dresidual) {
  const E *x = element_values<E>(r.x), *g = element_values<E>(r.g);
  const Values<T> centres = arranged<E>(centre, r.p), means_g = arranged<E>(mean_g, r.p),
                  slopes = arranged<E>(slope, r.p), scales = arranged<E>(scale, r.p);
  E* to = elements<E>(dx);
  E* kept = dresidual.defined() ? elements<E>(dresidual) : nullptr;
  r.p.run_back([&](int64_t at, int64_t rows) {
    fns<E>().grad(g + at, x + at, r.result(at), centres.data(), means_g.data(), slopes.data(),
                  scales.data(), to + at, kept ? kept + at : nullptr, rows, r.p.channels);
  });
}

template <class T>
void give(const Values<T>& values, const Tensor& to) {
  Tensor t = empty(to.shape(), dtype_of<T>);
  std::ranges::copy(values, t.template data<T>());
  convert_into(t, to);
}

// With h = (x - mean) rstd: db = sum(g), dw = sum(g h), dx = w rstd (g - db / n - h dw / n).
// `dresidual` may be undefined.
template <class E, class T>
void backward(const BatchNormAttributes& a, std::span<const Tensor> in, const Tensor& dx,
              const Tensor& dresidual, std::span<const Tensor> sums) {
  const GradRows<E> r(a, in);
  const Tensor mean = channel<T>(in[2]), var = channel<T>(in[3]);
  const GradSums<T> sum(r, mean.values<T>());
  const size_t channels = size_t(r.p.channels);
  Values<T> mean_g(channels), slope(channels), scale(channels, T(1)), dw(channels), db(channels);
  if (a.form.weight) std::copy_n(channel<T>(in[4]).template values<T>(), channels, scale.data());
  const double n = double(r.p.rows);
  for (size_t c = 0; c < channels; ++c) {
    const double rstd = 1 / std::sqrt(double(var.values<T>()[c]) + a.eps);
    db[c] = T(sum.g[c]), dw[c] = T(sum.product[c] * rstd);
    mean_g[c] = T(sum.g[c] / n), slope[c] = T(sum.product[c] * rstd * rstd / n);
    scale[c] *= T(rstd);
  }
  write_grad(r, mean.values<T>(), mean_g.data(), slope.data(), scale.data(), dx, dresidual);
  size_t next = 0;
  if (a.form.weight) give(dw, sums[next++]);
  if (a.form.bias) give(db, sums[next++]);
}

void run_batch_norm_grad(const Primitive& prim, std::span<const Tensor> in,
                         std::span<const Tensor> out, Workspace, const Stream&) {
  const auto& a = attributes_of<BatchNormAttributes>(prim);
  const std::span<const Tensor> sums = out.subspan(a.form.residual ? 2 : 1);
  if (in[1].numel() == 0) return zero(sums);
  const Tensor dresidual = a.form.residual ? out[1] : Tensor();
  with_types(in[1].dtype(), [&]<class E, class T>() {
    const ResultIn<E> dx(out[0]), kept(dresidual);
    backward<E, T>(a, in, dx.get(), kept.get(), sums);
    dx.finish(), kept.finish();
  });
}

// ---- the halves alone

void plan_nothing(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan&) {}

void run_stats(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
               const Stream&) {
  if (in[0].numel() == 0) return zero(out);
  with_types(in[0].dtype(), [&]<class E, class T>() {
    const Tensor x = as_rows<E>(in[0]);
    moments(Pieces(x.shape()), element_values<E>(x), out[0].data<T>(), out[1].data<T>());
  });
}

void run_apply(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
               Workspace, const Stream&) {
  if (in[0].numel() == 0) return;
  const auto& a = attributes_of<BatchNormAttributes>(prim);
  with_types(in[0].dtype(), [&]<class E, class T>() {
    const ResultIn<E> y(out[0]);
    const Tensor x = as_rows<E>(in[0]), mean = channel<T>(in[1]), var = channel<T>(in[2]);
    normalize(a, Pieces(x.shape()), element_values<E>(x), mean.values<T>(), var.values<T>(),
              in.subspan(3), elements<E>(y.get()));
    y.finish();
  });
}

void run_grad_stats(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                    Workspace, const Stream&) {
  if (in[1].numel() == 0) return zero(out);
  const auto& a = attributes_of<BatchNormAttributes>(prim);
  with_types(in[1].dtype(), [&]<class E, class T>() {
    const Tensor mean = channel<T>(in[2]);
    const GradSums<T> sum(GradRows<E>(a, in), mean.values<T>());
    std::ranges::transform(sum.g, out[0].data<T>(), [](double v) { return T(v); });
    std::ranges::transform(sum.product, out[1].data<T>(), [](double v) { return T(v); });
  });
}

void run_grad_apply(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                    Workspace, const Stream&) {
  if (in[1].numel() == 0) return;
  const auto& a = attributes_of<BatchNormAttributes>(prim);
  const Tensor dresidual = a.form.residual ? out[1] : Tensor();
  with_types(in[1].dtype(), [&]<class E, class T>() {
    const ResultIn<E> dx(out[0]), kept(dresidual);
    const GradRows<E> r(a, in);
    const Tensor mean = channel<T>(in[2]), var = channel<T>(in[3]), mean_g = channel<T>(in[4]),
                 product = channel<T>(in[5]);
    const size_t channels = size_t(r.p.channels);
    Values<T> slope(channels), scale(channels, T(1));
    if (a.form.weight) std::copy_n(channel<T>(in[6]).template values<T>(), channels, scale.data());
    for (size_t c = 0; c < channels; ++c) {
      const double rstd = 1 / std::sqrt(double(var.values<T>()[c]) + a.eps);
      slope[c] = T(product.values<T>()[c] * rstd * rstd), scale[c] *= T(rstd);
    }
    write_grad(r, mean.values<T>(), mean_g.values<T>(), slope.data(), scale.data(), dx.get(),
               kept.get());
    dx.finish(), kept.finish();
  });
}

}  // namespace

void register_batch_norm(KernelTable& t) {
  t.add(DeviceKind::kCPU, "batch_norm", {plan_batch_norm, run_batch_norm});
  t.add(DeviceKind::kCPU, "batch_norm_grad", {plan_batch_norm_grad, run_batch_norm_grad});
  t.add(DeviceKind::kCPU, "batch_norm_stats", {plan_nothing, run_stats});
  t.add(DeviceKind::kCPU, "batch_norm_apply", {plan_apply, run_apply});
  t.add(DeviceKind::kCPU, "batch_norm_grad_stats", {plan_nothing, run_grad_stats});
  t.add(DeviceKind::kCPU, "batch_norm_grad_apply", {plan_batch_norm_grad, run_grad_apply});
}

}  // namespace tessera::cpu
