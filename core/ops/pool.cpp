// Pooling: max_pool gives the largest values and their places, through which its gradient scatters;
// avg_pool is linear, its gradient's gradient is itself. Loops over batch and channels may be
// split, spatial ones are whole.
#include "core/ops/pool.h"

#include "core/dispatch/dispatch.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/pool_attributes.h"
#include "core/ops/register.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/ops/windows.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

using Windows = PoolAttributes::Windows;

Dims spatial_of(const Shape& s) { return Dims(std::span<const int64_t>(s).subspan(2)); }
Shape with_spatial(const Shape& s, const Dims& extents) {
  Shape r{s[0], s[1]};
  for (int64_t e : extents) r.push_back(e);
  return r;
}

class PoolFamily : public PrimitiveWith<PoolAttributes> {
 public:
  using PrimitiveWith::PrimitiveWith;

 protected:
  void check(const Meta& t, const char* what) const {
    TESSERA_CHECK_AS(ShapeError, t.shape.size() == windows.spatial() + 2 && is_floating(t.dtype),
                     "{}: {} is {}{}; expected floats with {} spatial dims", name(), what,
                     name_of(t.dtype), to_string(t.shape), windows.spatial());
  }
  void check_windows(const Shape& x) const { tessera::windows::check_meet(name(), windows, x); }
  void check_cotangent(const Meta& g) const {
    check(g, "the cotangent");
    TESSERA_CHECK_AS(ShapeError, spatial_of(g.shape) == windows.windows,
                     "{}: the cotangent is {}, there are {} windows", name(), to_string(g.shape),
                     to_string(windows.windows));
  }
  // Batch and channels pass; spatial loops of input and result are their own.
  AxisMap pool_axes(const Shape& x, int wide_in, int windows_in, int wide_out,
                    int windows_out) const {
    AxisMap m;
    OperandLoops wide, narrow;
    auto dim = [&](Factor::Kind kind, int64_t extent) { return DimLoops{m.add(kind, extent)}; };
    for (int d = 0; d < 2; ++d)
      wide.push_back(dim(Factor::kPass, x[d])), narrow.push_back(wide[size_t(d)]);
    for (int i = 0; i < windows.spatial(); ++i) {
      wide.push_back(dim(Factor::kWhole, x[i + 2]));
      narrow.push_back(dim(Factor::kWhole, windows.windows[i]));
    }
    for (int k = 0; k < wide_in; ++k) m.in.push_back(wide);
    for (int k = 0; k < windows_in; ++k) m.in.push_back(narrow);
    for (int k = 0; k < wide_out; ++k) m.out.push_back(wide);
    for (int k = 0; k < windows_out; ++k) m.out.push_back(narrow);
    return m;
  }
  static void check_made(const PoolAttributes& a, int count) {
    tessera::windows::check("pool", a.windows);
    TESSERA_CHECK(a.size.size() == count, "pool: size {}; expected {} numbers", to_string(a.size),
                  count);
  }
};

// Operands g [N, C, windows..], place (i32, of the same shape); result [N, C, size..].
class MaxPoolGrad final : public PrimitiveOf<MaxPoolGrad, PoolFamily> {
 public:
  static inline const OpInfo kOp{"max_pool_grad", {OpKind::kOther, Precision::kAsGiven, 2}};
  using PrimitiveOf::PrimitiveOf;
  static void check_attributes(const PoolAttributes& a) { check_made(a, a.windows.spatial()); }
  Metas infer(MetaSpan in) const override {
    check_cotangent(*in[0]);
    TESSERA_CHECK_AS(ShapeError, in[1]->shape == in[0]->shape && in[1]->dtype == kI32,
                     "max_pool_grad: operands are {}", describe(in));
    return {Meta::contiguous(with_spatial(in[0]->shape, size), in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = pool_axes(with_spatial(in[0]->shape, size), 0, 2, 1, 0);
    m.linear_in = 1;
    return m;
  }
  SaveMask saved() const override { return {2, 0}; }
  Tensors vjp(const VjpArgs& v) const override {
    Tensor u = flatten(v.cot[0], 2), place = flatten(cast(v.in[1], kI64), 2);
    return {reshape(gather(u, 2, place), v.in[0].shape()), Tensor()};
  }
};

// Operand x; results the largest values [N, C, windows..] and their places (i32).
class MaxPool final : public PrimitiveOf<MaxPool, PoolFamily> {
 public:
  static inline const OpInfo kOp{"max_pool", {OpKind::kOther, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  static void check_attributes(const PoolAttributes& a) { check_made(a, 0); }
  Metas infer(MetaSpan in) const override {
    check(*in[0], "x");
    check_windows(in[0]->shape);
    int64_t places = 1;
    for (int i = 2; i < in[0]->shape.size(); ++i) places *= in[0]->shape[i];
    TESSERA_CHECK_AS(ShapeError, places <= INT32_MAX,
                     "max_pool: x {} has {} places an image; indices are i32",
                     to_string(in[0]->shape), places);
    Shape s = with_spatial(in[0]->shape, windows.windows);
    return {Meta::contiguous(s, in[0]->dtype, in[0]->device),
            Meta::contiguous(s, kI32, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override { return pool_axes(in[0]->shape, 1, 0, 0, 2); }
  SaveMask saved() const override { return {0, 2}; }
  Tensors vjp(const VjpArgs& v) const override {
    return {dispatch1(PrimRef(new MaxPoolGrad({windows, spatial_of(v.in[0].shape())})),
                      operands(Tensor(v.cot[0]), Tensor(v.out[1])))};
  }
};

Tensor run_avg_pool(const Windows& w, const Tensor& x);

// Operand g [N, C, windows..]; result [N, C, size..].
class AvgPoolGrad final : public PrimitiveOf<AvgPoolGrad, PoolFamily> {
 public:
  static inline const OpInfo kOp{"avg_pool_grad", {OpKind::kOther, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  static void check_attributes(const PoolAttributes& a) { check_made(a, a.windows.spatial()); }
  Metas infer(MetaSpan in) const override {
    check_cotangent(*in[0]);
    return {Meta::contiguous(with_spatial(in[0]->shape, size), in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = pool_axes(with_spatial(in[0]->shape, size), 0, 1, 1, 0);
    m.linear_in = 1;
    return m;
  }
  Tensors vjp(const VjpArgs& v) const override { return {run_avg_pool(windows, v.cot[0])}; }
};

class AvgPool final : public PrimitiveOf<AvgPool, PoolFamily> {
 public:
  static inline const OpInfo kOp{"avg_pool", {OpKind::kOther, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  static void check_attributes(const PoolAttributes& a) { check_made(a, 0); }
  Metas infer(MetaSpan in) const override {
    check(*in[0], "x");
    check_windows(in[0]->shape);
    return {
        Meta::contiguous(with_spatial(in[0]->shape, windows.windows), in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = pool_axes(in[0]->shape, 1, 0, 0, 1);
    m.linear_in = 1;
    return m;
  }
  Tensors vjp(const VjpArgs& v) const override {
    return {dispatch1(PrimRef(new AvgPoolGrad({windows, spatial_of(v.in[0].shape())})),
                      operands(Tensor(v.cot[0])))};
  }
};

Tensor run_avg_pool(const Windows& w, const Tensor& x) {
  return dispatch1(PrimRef(new AvgPool({w})), operands(Tensor(x)));
}

// ---- the functions

// x with a batch dim, and whether it had none.
std::pair<Tensor, bool> batched(std::string_view op, const Tensor& x, int dims) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() == dims + 1 || x.ndim() == dims + 2,
                   "{}: x is {}; expected [N, C, ..] or [C, ..] with {} spatial dims", op,
                   describe(x), dims);
  return x.ndim() == dims + 1 ? std::pair(unsqueeze(x, 0), true) : std::pair(x, false);
}

Windows make_windows(std::string_view op, const Tensor& x, int dims, const PerDim& kernel,
                     const PerDim& stride, const PerDim& padding, const PerDim& dilation,
                     bool ceil_mode) {
  Windows w{{},
            kernel.expand(dims, 1, op, "kernel"),
            stride.expand(dims, 0, op, "stride"),
            padding.expand(dims, 0, op, "padding"),
            dilation.expand(dims, 1, op, "dilation")};
  for (int i = 0; i < dims; ++i) {
    if (w.stride[i] == 0) w.stride[i] = w.kernel[i];
    const int64_t extent = x.shape()[i + 2], reach = w.dilation[i] * (w.kernel[i] - 1) + 1,
                  pad = w.padding[i], step = w.stride[i];
    TESSERA_CHECK_AS(ShapeError, 2 * pad <= reach,
                     "{}: padding {} is more than half of the kernel {} (dilation {})", op,
                     to_string(w.padding), to_string(w.kernel), to_string(w.dilation));
    // In ceil mode the last window may reach beyond the padding, and so may the only one.
    const int64_t room = extent + 2 * pad - reach + (ceil_mode ? step - 1 : 0);
    TESSERA_CHECK_AS(ShapeError, room >= 0 && extent > 0,
                     "{}: the kernel {} does not fit into x {} (padding {}, dilation {})", op,
                     to_string(w.kernel), to_string(x.shape()), to_string(w.padding),
                     to_string(w.dilation));
    int64_t count = room / step + 1;
    if (ceil_mode && (count - 1) * step >= extent + pad) --count;  // it would begin in the padding
    w.windows.push_back(count);
  }
  return w;
}

Windows adaptive_windows(std::string_view op, const Tensor& x, int dims, const PerDim& output) {
  Windows w;
  w.windows = output.expand(dims, -1, op, "output");
  w.adaptive = true;
  for (int i = 0; i < dims; ++i) {
    if (w.windows[i] == -1) w.windows[i] = x.shape()[i + 2];
    TESSERA_CHECK_AS(ShapeError, w.windows[i] > 0 && x.shape()[i + 2] > 0,
                     "{}: output {} of x {}; extents must be positive", op, to_string(w.windows),
                     to_string(x.shape()));
  }
  return w;
}

std::pair<Tensor, Tensor> max_pool(std::string_view op, int dims, const Tensor& t,
                                   const PerDim& kernel, const MaxPoolOptions& o) {
  auto [x, added] = batched(op, t, dims);
  Windows w = make_windows(op, x, dims, kernel, o.stride, o.padding, o.dilation, o.ceil_mode);
  Tensors out = dispatch(PrimRef(new MaxPool({w})), operands(std::move(x)));
  return added ? std::pair(squeeze(out[0], 0), squeeze(out[1], 0)) : std::pair(out[0], out[1]);
}

Tensor avg_pool(std::string_view op, int dims, const Tensor& t, const PerDim& kernel,
                const AvgPoolOptions& o) {
  TESSERA_CHECK(o.divisor_override >= 0, "{}: divisor_override={} is negative", op,
                o.divisor_override);
  auto [x, added] = batched(op, t, dims);
  Windows w = make_windows(op, x, dims, kernel, o.stride, o.padding, 1, o.ceil_mode);
  w.count_padding = o.count_include_pad, w.divisor = o.divisor_override;
  Tensor y = run_avg_pool(w, x);
  return added ? squeeze(y, 0) : y;
}

Tensor adaptive_pool(std::string_view op, int dims, const Tensor& t, const PerDim& output,
                     bool max) {
  auto [x, added] = batched(op, t, dims);
  Windows w = adaptive_windows(op, x, dims, output);
  Tensor y =
      max ? dispatch(PrimRef(new MaxPool({w})), operands(std::move(x)))[0] : run_avg_pool(w, x);
  return added ? squeeze(y, 0) : y;
}

}  // namespace

std::pair<Tensor, Tensor> max_pool_with_indices(const Tensor& x, PerDim kernel, int spatial_dims,
                                                const MaxPoolOptions& o) {
  TESSERA_CHECK(spatial_dims >= 1 && spatial_dims <= 3,
                "max_pool_with_indices: spatial_dims={}; expected 1 to 3", spatial_dims);
  auto [y, place] = max_pool("max_pool_with_indices", spatial_dims, x, kernel, o);
  return {y, cast(place, kI64)};
}
Tensor max_pool1d(const Tensor& x, PerDim kernel, const MaxPoolOptions& o) {
  return max_pool("max_pool1d", 1, x, kernel, o).first;
}
Tensor max_pool2d(const Tensor& x, PerDim kernel, const MaxPoolOptions& o) {
  return max_pool("max_pool2d", 2, x, kernel, o).first;
}
Tensor max_pool3d(const Tensor& x, PerDim kernel, const MaxPoolOptions& o) {
  return max_pool("max_pool3d", 3, x, kernel, o).first;
}
Tensor avg_pool1d(const Tensor& x, PerDim kernel, const AvgPoolOptions& o) {
  return avg_pool("avg_pool1d", 1, x, kernel, o);
}
Tensor avg_pool2d(const Tensor& x, PerDim kernel, const AvgPoolOptions& o) {
  return avg_pool("avg_pool2d", 2, x, kernel, o);
}
Tensor avg_pool3d(const Tensor& x, PerDim kernel, const AvgPoolOptions& o) {
  return avg_pool("avg_pool3d", 3, x, kernel, o);
}
Tensor adaptive_avg_pool1d(const Tensor& x, PerDim output) {
  return adaptive_pool("adaptive_avg_pool1d", 1, x, output, false);
}
Tensor adaptive_avg_pool2d(const Tensor& x, PerDim output) {
  return adaptive_pool("adaptive_avg_pool2d", 2, x, output, false);
}
Tensor adaptive_avg_pool3d(const Tensor& x, PerDim output) {
  return adaptive_pool("adaptive_avg_pool3d", 3, x, output, false);
}
Tensor adaptive_max_pool1d(const Tensor& x, PerDim output) {
  return adaptive_pool("adaptive_max_pool1d", 1, x, output, true);
}
Tensor adaptive_max_pool2d(const Tensor& x, PerDim output) {
  return adaptive_pool("adaptive_max_pool2d", 2, x, output, true);
}
Tensor adaptive_max_pool3d(const Tensor& x, PerDim output) {
  return adaptive_pool("adaptive_max_pool3d", 3, x, output, true);
}

// ---- samples

namespace {

struct PoolSample {
  Windows windows;
  Shape x;
};
// Overlapping windows with padding, a last window beyond the end, dilation, one and three spatial
// dims, adaptive windows that overlap.
std::vector<PoolSample> pool_samples(bool max) {
  std::vector<PoolSample> all = {
      {{{3, 2}, {3, 2}, {2, 3}, {1, 0}, {1, 1}}, {2, 3, 5, 6}},
      {{{4}, {2}, {2}, {0}, {1}, false, false}, {3, 2, 7}},
      {{{2, 2, 1}, {2, 3, 2}, {1, 2, 2}, {0, 1, 0}, {1, 1, 1}}, {1, 2, 3, 4, 2}},
      {{{3, 2}, {}, {}, {}, {}, true}, {2, 2, 4, 5}}};
  if (max)
    all.push_back({{{3, 4}, {2, 3}, {1, 1}, {1, 1}, {2, 1}}, {1, 2, 3, 4}});
  else
    all.push_back({{{2, 2}, {2, 2}, {2, 2}, {0, 0}, {1, 1}, false, true, 3}, {2, 1, 4, 4}});
  return all;
}
PrimRef max_pool_of(const Windows& w) { return PrimRef(new MaxPool({w})); }

}  // namespace

void register_pool_ops(OpRegistry& registry) {
  registry.add("max_pool", [] {
    std::vector<Sample> all;
    for (const PoolSample& s : pool_samples(true))
      all.push_back({max_pool_of(s.windows), {sample_values(s.x, -1, 1, 1)}});
    return all;
  });
  registry.add("max_pool_grad", [] {
    std::vector<Sample> all;
    for (const PoolSample& s : pool_samples(true)) {
      Tensors out = dispatch(max_pool_of(s.windows), operands(sample_values(s.x, -1, 1, 1)));
      all.push_back({PrimRef(new MaxPoolGrad({s.windows, spatial_of(s.x)})),
                     {sample_values(out[0].shape(), -1, 1, 2), out[1]}});
    }
    return all;
  });
  registry.add("avg_pool", [] {
    std::vector<Sample> all;
    for (const PoolSample& s : pool_samples(false))
      all.push_back({PrimRef(new AvgPool({s.windows})), {sample_values(s.x, -1, 1, 1)}});
    return all;
  });
  registry.add("avg_pool_grad", [] {
    std::vector<Sample> all;
    for (const PoolSample& s : pool_samples(false))
      all.push_back({PrimRef(new AvgPoolGrad({s.windows, spatial_of(s.x)})),
                     {sample_values(with_spatial(s.x, s.windows.windows), -1, 1, 2)}});
    return all;
  });
}

}  // namespace tessera
