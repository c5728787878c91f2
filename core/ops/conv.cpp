// Convolutions: three primitives that are each other's gradients, so that derivatives of any order
// stay among them. Their loops (conv_attributes.h) split over batch and channels; spatial loops are
// whole, for neighbours would have to be exchanged.
#include "core/ops/conv.h"

#include "core/dispatch/dispatch.h"
#include "core/dispatch/precision.h"
#include "core/ops/conv_grad_norm.h"
#include "core/ops/conv_stats.h"
#include "core/ops/pointwise.h"
#include "core/ops/register.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/ops/windows.h"
#include "core/primitive/primitive_of.h"
#include "core/tensor/extents.h"

namespace tessera {

Dims PerDim::expand(int dims, int64_t least, std::string_view op, std::string_view argument) const {
  TESSERA_CHECK_AS(ShapeError, v_.size() == 1 || v_.size() == dims,
                   "{}: {} {} for {} spatial dims; give one number, or one for each", op, argument,
                   to_string(v_), dims);
  Dims all;
  for (int i = 0; i < dims; ++i) all.push_back(v_[v_.size() == 1 ? 0 : i]);
  for (int64_t n : all)
    TESSERA_CHECK_AS(ShapeError, n >= least && n <= windows::kMost, "{}: {} {}; each is {} to {}",
                     op, argument, to_string(v_), least, windows::kMost);
  return all;
}

namespace {

using Window = ConvAttributes::Window;

// The loops of a convolution, from any two of its operands: x [N, G Ci, I..], w [G Co, Ci, K..], y
// [N, G Co, O..]. An axis map names the loops of each operand by these.
struct ConvLoops {
  AxisMap map;
  OperandLoops x, w, y;

  // The loops that the result lacks are summed.
  ConvLoops(const Shape& xs, const Shape& ws, const Shape& ys, int64_t groups, Factor::Kind batch,
            Factor::Kind output, Factor::Kind input) {
    DimLoops n{map.add(batch, xs[0])}, ci{map.add(input, ws[1])},
        co{map.add(output, groups ? ws[0] / groups : 0)}, of_x = ci, of_w = co;
    if (groups != 1) {  // else channels are what a rank can have a part of
      int g = map.add(Factor::kPass, groups);
      of_x.insert(0, g), of_w.insert(0, g);
    }
    x = {n, of_x}, w = {of_w, ci}, y = {n, of_w};
    for (int d = 2; d < xs.size(); ++d) {
      x.push_back({map.add(Factor::kWhole, xs[d])});
      w.push_back({map.add(Factor::kWhole, ws[d])});
      y.push_back({map.add(Factor::kWhole, ys[d])});
    }
    map.linear_in = 3;
  }
};

Tensor run_conv(const Window& window, const Tensor& x, const Tensor& w);
Tensor run_grad_input(const Window& window, const Dims& size, const Tensor& g, const Tensor& w);
Tensor run_grad_weight(const Window& window, const Dims& size, const Tensor& g, const Tensor& x,
                       const Tensor& grad_buffer = {});

// What is common to the three: checks of operands and attributes, the group loop on a rank.
class ConvFamily : public PrimitiveWith<ConvAttributes> {
 public:
  using PrimitiveWith::PrimitiveWith;
  SaveMask saved() const override { return {3, 0}; }

 protected:
  void check_operands(MetaSpan in) const {
    const Meta &a = *in[0], &b = *in[1];
    TESSERA_CHECK_AS(ShapeError, a.shape.size() == spatial() + 2 && b.shape.size() == spatial() + 2,
                     "{}: operands are {}; with {} spatial dims each has {}", name(), describe(in),
                     spatial(), spatial() + 2);
    TESSERA_CHECK(a.dtype == b.dtype && is_floating(a.dtype),
                  "{}: operands are {}; convert them to one float dtype", name(), describe(in));
  }
  void check_channels(const Shape& xs, const Shape& ws) const {
    windows::check_channels(name(), window, xs, ws);
  }
  Shape output(const Shape& xs, const Shape& ws) const {
    return windows::output(name(), window, xs, ws);
  }
  void check_output(const Shape& g, const Shape& xs, const Shape& ws) const {
    TESSERA_CHECK_AS(ShapeError, g == output(xs, ws), "{}: {} is no output of x {} and weight {}",
                     name(), to_string(g), to_string(xs), to_string(ws));
  }
  // Every element of the output y is a sum over the weights of its channel.
  static double flops_of(const Shape& y, const Shape& w) {
    return 2 * double(numel(y)) * double(numel(w)) / double(std::max<int64_t>(w[0], 1));
  }
  // The window of a rank: its share of the groups, `output` being the loops of w's dim 0.
  Window local_window(const DimLoops& output, std::span<const Range> loops) const {
    Window w = window;
    if (w.groups > 1) w.groups = loops[size_t(output[0])].size;
    return w;
  }
  static void check_made(const ConvAttributes& a, int count) {
    windows::check("convolution", a.window);
    TESSERA_CHECK(a.size.size() == count, "convolution: size {}; expected {} numbers",
                  to_string(a.size), count);
  }
};

// Operands x [N, C, I..], w [O, C / groups, K..].
class Conv final : public PrimitiveOf<Conv, ConvFamily> {
 public:
  double flops(MetaSpan in, std::span<const Meta> out) const override {
    return flops_of(out[0].shape, in[1]->shape);
  }
  static inline const OpInfo kOp{"conv", {OpKind::kProduct, Precision::kLow, 2}};
  using PrimitiveOf::PrimitiveOf;
  static void check_attributes(const ConvAttributes& a) { check_made(a, 0); }
  Metas infer(MetaSpan in) const override {
    check_operands(in);
    check_channels(in[0]->shape, in[1]->shape);
    return {Meta::contiguous(output(in[0]->shape, in[1]->shape), in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    const Shape &xs = in[0]->shape, &ws = in[1]->shape;
    ConvLoops l(xs, ws, output(xs, ws), window.groups, Factor::kPass, Factor::kPass, Factor::kSum);
    l.map.in = {l.x, l.w}, l.map.out = {l.y};
    return l.map;
  }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const override {
    if (window.groups == 1) return nullptr;
    return PrimRef(new Conv({local_window(map.in[1][0], loops)}));
  }
  Tensors vjp(const VjpArgs& v) const override {
    const Tensor &x = v.in[0], &w = v.in[1], &g = v.cot[0];
    Dims extents, kernel;
    for (int d = 2; d < x.ndim(); ++d) extents.push_back(x.shape()[d]);
    for (int d = 1; d < w.ndim(); ++d) kernel.push_back(w.shape()[d]);
    return {v.wants(0) ? run_grad_input(window, extents, g, w) : Tensor(),
            v.wants(1) ? run_grad_weight(window, kernel, g, x, v.grad_buffer_of(1)) : Tensor()};
  }
};

// Operands g [N, O, ..] (a cotangent of y), w; result [N, C, size..].
class ConvGradInput final : public PrimitiveOf<ConvGradInput, ConvFamily> {
 public:
  double flops(MetaSpan in, std::span<const Meta>) const override {
    return flops_of(in[0]->shape, in[1]->shape);
  }
  static inline const OpInfo kOp{"conv_grad_input", {OpKind::kProduct, Precision::kLow, 2}};
  using PrimitiveOf::PrimitiveOf;
  static void check_attributes(const ConvAttributes& a) { check_made(a, a.spatial()); }
  Metas infer(MetaSpan in) const override {
    check_operands(in);
    Shape xs = x_shape(in);
    check_channels(xs, in[1]->shape);
    check_output(in[0]->shape, xs, in[1]->shape);
    return {Meta::contiguous(xs, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    ConvLoops l(x_shape(in), in[1]->shape, in[0]->shape, window.groups, Factor::kPass, Factor::kSum,
                Factor::kPass);
    l.map.in = {l.y, l.w}, l.map.out = {l.x};
    return l.map;
  }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const override {
    if (window.groups == 1) return nullptr;
    return PrimRef(new ConvGradInput({local_window(map.in[1][0], loops), size}));
  }
  Tensors vjp(const VjpArgs& v) const override {
    const Tensor &g = v.in[0], &w = v.in[1], &u = v.cot[0];
    Dims kernel;
    for (int d = 1; d < w.ndim(); ++d) kernel.push_back(w.shape()[d]);
    return {v.wants(0) ? run_conv(window, u, w) : Tensor(),
            v.wants(1) ? run_grad_weight(window, kernel, g, u) : Tensor()};
  }

 private:
  Shape x_shape(MetaSpan in) const {
    Shape s{in[0]->shape[0], in[1]->shape[1] * window.groups};
    for (int64_t e : size) s.push_back(e);
    return s;
  }
};

// Operands g [N, O, ..], x; result [O, size..].
class ConvGradWeight final : public PrimitiveOf<ConvGradWeight, ConvFamily> {
 public:
  double flops(MetaSpan in, std::span<const Meta> out) const override {
    return flops_of(in[0]->shape, out[0].shape);
  }
  static inline const OpInfo kOp{"conv_grad_weight", {OpKind::kProduct, Precision::kAsGiven, 2}};
  using PrimitiveOf::PrimitiveOf;
  static void check_attributes(const ConvAttributes& a) { check_made(a, a.spatial() + 1); }
  Metas infer(MetaSpan in) const override {
    check_operands(in);
    Shape ws = w_shape(in);
    check_channels(in[1]->shape, ws);
    check_output(in[0]->shape, in[1]->shape, ws);
    return {Meta::contiguous(ws, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    ConvLoops l(in[1]->shape, w_shape(in), in[0]->shape, window.groups, Factor::kSum, Factor::kPass,
                Factor::kPass);
    l.map.in = {l.y, l.x}, l.map.out = {l.w};
    return l.map;
  }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const override {
    Dims local = size;
    local[0] = range_of(map.out[0][1], loops).size;
    return PrimRef(new ConvGradWeight({local_window(map.out[0][0], loops), local}));
  }
  Tensors vjp(const VjpArgs& v) const override {
    const Tensor &g = v.in[0], &x = v.in[1], &u = v.cot[0];
    Dims extents;
    for (int d = 2; d < x.ndim(); ++d) extents.push_back(x.shape()[d]);
    return {v.wants(0) ? run_conv(window, x, u) : Tensor(),
            v.wants(1) ? run_grad_input(window, extents, g, u) : Tensor()};
  }

 private:
  Shape w_shape(MetaSpan in) const {
    Shape s{in[0]->shape[1]};
    for (int64_t e : size) s.push_back(e);
    return s;
  }
};

Tensor run_conv(const Window& window, const Tensor& x, const Tensor& w) {
  return dispatch1(PrimRef(new Conv({window})), operands(Tensor(x), Tensor(w)));
}
Tensor run_grad_input(const Window& window, const Dims& size, const Tensor& g, const Tensor& w) {
  return dispatch1(PrimRef(new ConvGradInput({window, size})), operands(Tensor(g), Tensor(w)));
}
Tensor run_grad_weight(const Window& window, const Dims& size, const Tensor& g, const Tensor& x,
                       const Tensor& grad_buffer) {
  return dispatch_into(grad_buffer, PrimRef(new ConvGradWeight({window, size})),
                       operands(Tensor(g), Tensor(x)));
}

// ---- the functions

// x with a batch dim, and whether it had none.
struct Batched {
  Tensor x;
  bool added;
  Batched(std::string_view op, const Tensor& t, const Tensor& weight, const Tensor& bias, int dims,
          int64_t outputs)
      : x(t), added(t.ndim() == dims + 1) {
    TESSERA_CHECK_AS(ShapeError, t.ndim() == dims + 1 || t.ndim() == dims + 2,
                     "{}: x is {}; expected [N, C, ..] or [C, ..] with {} spatial dims", op,
                     describe(t), dims);
    TESSERA_CHECK_AS(ShapeError, weight.ndim() == dims + 2, "{}: weight is {}; expected {} dims",
                     op, describe(weight), dims + 2);
    TESSERA_CHECK_AS(ShapeError, !bias.defined() || bias.shape() == Shape{outputs},
                     "{}: bias is {}; expected [{}], one for each output channel of weight {}", op,
                     describe(bias), outputs, to_string(weight.shape()));
    if (added) x = unsqueeze(t, 0);
  }
  Tensor finish(Tensor y, const Tensor& bias) const {
    if (bias.defined()) {
      Shape s = Dims::filled(y.ndim() - 1, 1);
      s[0] = bias.numel();
      Tensor sum[] = {std::move(y), bias};
      autocast_operands(Precision::kLow, sum);
      y = std::move(sum[0]) + reshape(sum[1], s);
    }
    return added ? squeeze(y, 0) : y;
  }
};

void check_groups(std::string_view op, int64_t groups) {
  TESSERA_CHECK_AS(ShapeError, groups > 0, "{}: groups={} must be positive", op, groups);
}

Tensor convolve(std::string_view op, int dims, const Tensor& x, const Tensor& weight,
                const Tensor& bias, const ConvGeometry& o) {
  check_groups(op, o.groups);
  Batched b(op, x, weight, bias, dims, weight.ndim() ? weight.shape()[0] : 0);
  Window w{o.stride.expand(dims, 1, op, "stride"),
           o.dilation.expand(dims, 1, op, "dilation"),
           o.padding.both().expand(dims, 0, op, "padding"),
           {},
           o.groups};
  w.pad_end = w.pad_begin;
  if (o.padding.same())
    for (int i = 0; i < dims; ++i) {
      TESSERA_CHECK_AS(ShapeError, w.stride[i] == 1,
                       "{}: padding=same with stride {}; it keeps extents for stride 1 only", op,
                       to_string(w.stride));
      int64_t both = w.dilation[i] * (weight.shape()[i + 2] - 1);
      w.pad_begin[i] = both / 2, w.pad_end[i] = both - both / 2;
    }
  return b.finish(run_conv(w, b.x, weight), bias);
}

Tensor convolve_transposed(std::string_view op, int dims, const Tensor& x, const Tensor& weight,
                           const Tensor& bias, const ConvTransposeOptions& o) {
  check_groups(op, o.groups);
  Batched b(op, x, weight, bias, dims, weight.ndim() > 1 ? weight.shape()[1] * o.groups : 0);
  Window w{o.stride.expand(dims, 1, op, "stride"),
           o.dilation.expand(dims, 1, op, "dilation"),
           o.padding.expand(dims, 0, op, "padding"),
           {},
           o.groups};
  const Shape &xs = b.x.shape(), &ws = weight.shape();
  TESSERA_CHECK_AS(ShapeError, xs[1] == ws[0] && ws[0] % o.groups == 0,
                   "{}: x {} has {} channels, weight {} takes {} in groups={}", op,
                   to_string(x.shape()), xs[1], to_string(ws), ws[0], o.groups);
  Dims more = o.output_padding.expand(dims, 0, op, "output_padding"), size;
  w.pad_end = w.pad_begin;
  for (int i = 0; i < dims; ++i) {
    TESSERA_CHECK_AS(ShapeError, more[i] < std::max(w.stride[i], w.dilation[i]),
                     "{}: output_padding {} must be less than stride {} or dilation {}", op,
                     to_string(more), to_string(w.stride), to_string(w.dilation));
    TESSERA_CHECK_AS(ShapeError, b.x.shape()[i + 2] > 0,
                     "{}: x is {}; spatial extents must be positive", op, describe(x));
    const int64_t moved = extent_product(b.x.shape()[i + 2] - 1, w.stride[i], op),
                  reach = extent_product(w.dilation[i], weight.shape()[i + 2] - 1, op);
    size.push_back(extent_sum(moved - 2 * w.pad_begin[i], reach + more[i] + 1, op));
    TESSERA_CHECK_AS(ShapeError, size[i] > 0,
                     "{}: x {} with weight {} and padding {} leaves an output of extent {}", op,
                     to_string(x.shape()), to_string(weight.shape()), to_string(w.pad_begin),
                     size[i]);
    // The convolution that this is the gradient of gives x's extents exactly.
    w.pad_end[i] -= more[i];
  }
  return b.finish(run_grad_input(w, size, b.x, weight), bias);
}

}  // namespace

void check_conv(const ConvAttributes& attributes) { Conv::check_attributes(attributes); }
PrimRef conv_op(const ConvAttributes& attributes) { return PrimRef(new Conv(attributes)); }
void check_conv_grad_input(const ConvAttributes& attributes) {
  ConvGradInput::check_attributes(attributes);
}
PrimRef conv_grad_input_op(const ConvAttributes& attributes) {
  return PrimRef(new ConvGradInput(attributes));
}

Tensor conv1d(const Tensor& x, const Tensor& w, const Tensor& b, const ConvGeometry& o) {
  return convolve("conv1d", 1, x, w, b, o);
}
Tensor conv2d(const Tensor& x, const Tensor& w, const Tensor& b, const ConvGeometry& o) {
  return convolve("conv2d", 2, x, w, b, o);
}
Tensor conv3d(const Tensor& x, const Tensor& w, const Tensor& b, const ConvGeometry& o) {
  return convolve("conv3d", 3, x, w, b, o);
}
Tensor conv_transpose1d(const Tensor& x, const Tensor& w, const Tensor& b,
                        const ConvTransposeOptions& o) {
  return convolve_transposed("conv_transpose1d", 1, x, w, b, o);
}
Tensor conv_transpose2d(const Tensor& x, const Tensor& w, const Tensor& b,
                        const ConvTransposeOptions& o) {
  return convolve_transposed("conv_transpose2d", 2, x, w, b, o);
}
Tensor conv_transpose3d(const Tensor& x, const Tensor& w, const Tensor& b,
                        const ConvTransposeOptions& o) {
  return convolve_transposed("conv_transpose3d", 3, x, w, b, o);
}

// ---- samples

namespace {

struct ConvSample {
  Window window;
  Shape x, w;
};
// Extents that tell loops apart; then groups, depthwise, one spatial dim and three, padding that
// differs at the ends, places that the kernel does not reach, channels of one.
std::vector<ConvSample> conv_samples() {
  return {{{{1, 1}, {1, 1}, {1, 1}, {1, 1}, 1}, {2, 3, 5, 4}, {4, 3, 3, 2}},
          {{{2, 3}, {1, 2}, {1, 0}, {1, 0}, 1}, {3, 2, 6, 8}, {5, 2, 3, 2}},
          {{{1, 1}, {1, 1}, {0, 1}, {1, 0}, 2}, {2, 4, 3, 4}, {6, 2, 2, 2}},
          {{{1, 1}, {1, 1}, {1, 1}, {1, 1}, 3}, {2, 3, 4, 4}, {3, 1, 3, 3}},
          {{{2}, {1}, {2}, {-1}, 1}, {2, 3, 8}, {2, 3, 3}},
          {{{1, 2, 1}, {1, 1, 2}, {1, 0, 1}, {0, 1, 1}, 1}, {2, 2, 3, 4, 3}, {3, 2, 2, 3, 2}},
          {{{1}, {1}, {0}, {0}, 1}, {1, 1, 4}, {1, 1, 1}}};
}

Shape output_of(const ConvSample& s) {
  Shape y{s.x[0], s.w[0]};
  for (int i = 0; i < s.window.stride.size(); ++i)
    y.push_back(s.window.places(i, s.x[i + 2], s.w[i + 2]));
  return y;
}

}  // namespace

void register_conv_ops(OpRegistry& registry) {
  registry.add("conv", [] {
    std::vector<Sample> all;
    for (const ConvSample& s : conv_samples())
      all.push_back({PrimRef(new Conv({s.window})),
                     {sample_values(s.x, -1, 1, 1), sample_values(s.w, -1, 1, 2)}});
    return all;
  });
  registry.add("conv_grad_input", [] {
    std::vector<Sample> all;
    for (const ConvSample& s : conv_samples())
      all.push_back({PrimRef(new ConvGradInput({s.window, Dims(std::span(s.x).subspan(2))})),
                     {sample_values(output_of(s), -1, 1, 1), sample_values(s.w, -1, 1, 2)}});
    return all;
  });
  registry.add("conv_grad_weight", [] {
    std::vector<Sample> all;
    for (const ConvSample& s : conv_samples())
      all.push_back({PrimRef(new ConvGradWeight({s.window, Dims(std::span(s.w).subspan(1))})),
                     {sample_values(output_of(s), -1, 1, 1), sample_values(s.x, -1, 1, 2)}});
    return all;
  });
}

}  // namespace tessera
