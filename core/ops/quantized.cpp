#include "core/ops/quantized.h"

#include <cmath>

#include "core/dispatch/dispatch.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/conv.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/pool.h"
#include "core/ops/quantized_layer.h"
#include "core/ops/register.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/ops/windows.h"

namespace tessera {
namespace {

using Form = QuantizedLayerAttributes::Form;
using Window = ConvAttributes::Window;
using Windows = PoolAttributes::Windows;

void check_zero_point(std::string_view op, int zero_point) {
  TESSERA_CHECK(zero_point >= 0 && zero_point <= 255, "{}: zero_point={} is not in 0..255", op,
                zero_point);
}
void check_scale(std::string_view op, double scale) {
  TESSERA_CHECK(scale > 0 && scale < INFINITY, "{}: scale={} must be positive and finite", op,
                scale);
}

Tensor as_u8(const Tensor& whole) { return cast(clamp(whole, 0.0, 255.0), kU8); }

// ---- between f32 and u8

class QuantizeFamily : public PrimitiveWith<QuantizationParameters> {
 public:
  using PrimitiveWith::PrimitiveWith;
  AxisMap axes(MetaSpan in) const override { return pointwise_axes(in, in[0]->shape); }
  bool decomposable() const override { return true; }
  static void check_attributes(const QuantizationParameters& q) {
    check_scale("quantize", q.scale), check_zero_point("quantize", q.zero_point);
  }
};

class Quantize final : public PrimitiveOf<Quantize, QuantizeFamily> {
 public:
  static inline const OpInfo kOp{"quantize", {OpKind::kOther, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    TESSERA_CHECK(is_floating(in[0]->dtype), "quantize: x is {}; expected floats", describe(in));
    return {Meta::contiguous(in[0]->shape, kU8, in[0]->device)};
  }
  Tensors decompose(std::span<const Tensor> in) const override {
    return {as_u8(round(cast(in[0], kF32) * double(float(1 / scale))) + double(zero_point))};
  }
};

class Dequantize final : public PrimitiveOf<Dequantize, QuantizeFamily> {
 public:
  static inline const OpInfo kOp{"dequantize", {OpKind::kOther, Precision::kAsGiven, 1}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    TESSERA_CHECK(in[0]->dtype == kU8, "dequantize: x is {}; expected u8", describe(in));
    return {Meta::contiguous(in[0]->shape, kF32, in[0]->device)};
  }
  Tensors decompose(std::span<const Tensor> in) const override {
    return {(cast(in[0], kF32) - double(zero_point)) * double(float(scale))};
  }
};

// ---- layers

class LayerFamily : public QuantizedLayer {
 public:
  using QuantizedLayer::QuantizedLayer;
  int64_t operand_count() const override { return 4 + form.residual; }
  Metas infer(MetaSpan in) const override {
    TESSERA_CHECK(int64_t(in.size()) == operand_count(),
                  "{}: {} operands; expected x, weight, scale, bias{}", name(), in.size(),
                  form.residual ? " and a residual" : "");
    const Meta &x = *in[0], &w = *in[1];
    TESSERA_CHECK(
        x.dtype == kU8 && w.dtype == kU8 && is_floating(in[2]->dtype) &&
            in[3]->dtype == in[2]->dtype,
        "{}: operands are {}; expected u8 x and weight, scale and bias of one float dtype", name(),
        describe(in));
    Shape s = output(x.shape, w.shape);
    for (int i : {2, 3})
      TESSERA_CHECK_AS(ShapeError, in[size_t(i)]->shape == Shape{w.shape[0]},
                       "{}: operands are {}; scale and bias have one value for each of the {} rows "
                       "of the weight",
                       name(), describe(in), w.shape[0]);
    if (form.residual)
      TESSERA_CHECK_AS(ShapeError, in[4]->shape == s && in[4]->dtype == kU8,
                       "{}: residual is {}{}, the result {}", name(), name_of(in[4]->dtype),
                       to_string(in[4]->shape), to_string(s));
    return {Meta::contiguous(s, form.quantized ? kU8 : kF32, x.device)};
  }
  // The batch passes, all else is whole.
  AxisMap axes(MetaSpan in) const override {
    AxisMap m;
    const Shape& x = in[0]->shape;
    const bool batched = x.size() > 1;
    if (batched) m.add(Factor::kPass, x[0]);
    auto whole = [&](const Shape& s, bool first_is_batch) {
      OperandLoops loops;
      for (int d = 0; d < s.size(); ++d)
        loops.push_back({d == 0 && first_is_batch && batched ? 0 : m.add(Factor::kWhole, s[d])});
      return loops;
    };
    m.in = {whole(x, true)};
    for (int i : {1, 2, 3}) m.in.push_back(whole(in[size_t(i)]->shape, false));
    OperandLoops y = whole(output(x, in[1]->shape), true);
    if (form.residual) m.in.push_back(y);
    m.out = {y};
    return m;
  }
  bool decomposable() const override { return true; }
  // Sums of less than 2^24 are exact in f32; the kernel's are in i32.
  Tensors decompose(std::span<const Tensor> in) const override {
    Tensor x = cast(in[0], kF32) - double(form.x_zero_point),
           w = cast(in[1], kF32) - double(kWeightZeroPoint);
    auto beside = [&](const Tensor& t, int ndim) {
      Shape s = Dims::filled(ndim, 1);
      s[spatial() == 0 ? ndim - 1 : 1] = t.numel();
      return reshape(cast(t, kF32), s);
    };
    Tensor y = spatial() == 0 ? linear(x, w) : convolve(x, w);
    y = y * beside(in[2], y.ndim()) + beside(in[3], y.ndim());
    if (form.residual)
      y = y + (cast(in[4], kF32) - double(form.residual_zero_point)) * form.residual_scale;
    if (form.relu) y = relu(y);
    return {form.quantized ? as_u8(round(y + double(form.y_zero_point))) : y};
  }

 protected:
  static void check(std::string_view op, const Form& f) {
    check_zero_point(op, f.x_zero_point), check_zero_point(op, f.residual_zero_point);
    check_zero_point(op, f.y_zero_point), check_scale(op, f.residual_scale);
    const Window& w = f.window;
    windows::check(op, w, 0);
    TESSERA_CHECK(w.groups > 0, "{}: groups={} must be positive", op, w.groups);
    for (int i = 0; i < w.stride.size(); ++i)
      TESSERA_CHECK(w.pad_begin[i] >= 0 && w.pad_end[i] >= 0,
                    "{}: padding {} and {} must not be negative", op, to_string(w.pad_begin),
                    to_string(w.pad_end));
  }

 private:
  Shape output(const Shape& x, const Shape& w) const {
    const int n = spatial();
    TESSERA_CHECK_AS(ShapeError,
                     n == 0
                         ? x.size() >= 1 && w.size() == 2 && x[x.size() - 1] == w[1]
                         : x.size() == n + 2 && w.size() == n + 2 &&
                               x[1] == w[1] * form.window.groups && w[0] % form.window.groups == 0,
                     "{}: x {} does not fit weight {} (out, in ..) with groups={}", name(),
                     to_string(x), to_string(w), form.window.groups);
    if (n > 0) return windows::output(name(), form.window, x, w);
    Shape s = x;
    s[x.size() - 1] = w[0];
    return s;
  }
  Tensor convolve(const Tensor& x, const Tensor& w) const {
    const Window& v = form.window;
    Dims pads;
    for (int i = spatial() - 1; i >= 0; --i)
      pads.push_back(v.pad_begin[i]), pads.push_back(v.pad_end[i]);
    const ConvGeometry options{
        .stride = PerDim(v.stride), .dilation = PerDim(v.dilation), .groups = v.groups};
    auto conv = spatial() == 1 ? conv1d : spatial() == 2 ? conv2d : conv3d;
    return conv(pad(x, pads), w, {}, options);
  }
};

class QuantizedLinear final : public PrimitiveOf<QuantizedLinear, LayerFamily> {
 public:
  static inline const OpInfo kOp{"quantized_linear", {OpKind::kProduct, Precision::kAsGiven, 4}};
  explicit QuantizedLinear(const QuantizedLayerAttributes& a) : PrimitiveOf(kOp, a) {
    check(name(), form);
    TESSERA_CHECK(spatial() == 0, "quantized_linear: {} spatial dims; expected none", spatial());
  }
};
class QuantizedConv final : public PrimitiveOf<QuantizedConv, LayerFamily> {
 public:
  static inline const OpInfo kOp{"quantized_conv", {OpKind::kProduct, Precision::kAsGiven, 4}};
  explicit QuantizedConv(const QuantizedLayerAttributes& a) : PrimitiveOf(kOp, a) {
    check(name(), form);
    TESSERA_CHECK(spatial() > 0, "quantized_conv: no spatial dims; expected 1 to 3");
  }
};

// ---- pooling

class QuantizedMaxPool final : public PrimitiveOf<QuantizedMaxPool, QuantizedPoolAttributes> {
 public:
  static inline const OpInfo kOp{"quantized_max_pool", {OpKind::kOther, Precision::kAsGiven, 1}};
  explicit QuantizedMaxPool(const QuantizedPoolAttributes& a) : PrimitiveOf(kOp, a) {
    const Windows& w = windows;
    TESSERA_CHECK(!w.adaptive, "quantized_max_pool: windows are adaptive; pool in f32");
    tessera::windows::check("quantized_max_pool", w);
    for (int i = 0; i < w.spatial(); ++i)
      TESSERA_CHECK(w.padding[i] >= 0 && w.padding[i] <= w.dilation[i] * (w.kernel[i] - 1),
                    "quantized_max_pool: windows {}, kernel {}, stride {}, padding {}, dilation {} "
                    "are no windows",
                    to_string(w.windows), to_string(w.kernel), to_string(w.stride),
                    to_string(w.padding), to_string(w.dilation));
  }
  Metas infer(MetaSpan in) const override {
    const Meta& x = *in[0];
    TESSERA_CHECK_AS(ShapeError, x.dtype == kU8 && x.shape.size() == windows.spatial() + 2,
                     "quantized_max_pool: x is {}; expected u8 with {} spatial dims", describe(in),
                     windows.spatial());
    tessera::windows::check_meet(name(), windows, x.shape);
    Shape s{x.shape[0], x.shape[1]};
    for (int64_t e : windows.windows) s.push_back(e);
    return {Meta::contiguous(s, kU8, x.device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m;
    OperandLoops x, y;
    auto loops = [&](Factor::Kind kind, int64_t extent) { return DimLoops{m.add(kind, extent)}; };
    for (int d = 0; d < 2; ++d)
      x.push_back(loops(Factor::kPass, in[0]->shape[d])), y.push_back(x[size_t(d)]);
    for (int i = 0; i < windows.spatial(); ++i) {
      x.push_back(loops(Factor::kWhole, in[0]->shape[i + 2]));
      y.push_back(loops(Factor::kWhole, windows.windows[i]));
    }
    m.in = {x}, m.out = {y};
    return m;
  }
};

template <class Op>
Tensor run_layer(const Window& window, const Tensor& x, int x_zero_point, const Tensor& weight,
                 const Tensor& scale, const Tensor& bias, const QuantizedEpilogue& then) {
  const bool residual = then.residual.defined();
  PrimRef prim(new Op(
      QuantizedLayerAttributes{{window, x_zero_point, residual, residual ? then.residual_scale : 1,
                                residual ? then.residual_zero_point : 0, then.relu, then.quantized,
                                then.quantized ? then.y_zero_point : 0, then.constant}}));
  Tensor in[] = {x, weight, scale, bias, then.residual};
  return dispatch1(prim, Inputs(in, residual ? 5 : 4));
}

}  // namespace

Tensor quantize(const Tensor& x, const QuantizationParameters& q) {
  check_scale("quantize", q.scale), check_zero_point("quantize", q.zero_point);
  return dispatch1(PrimRef(new Quantize(q)), operands(Tensor(x)));
}
Tensor dequantize(const Tensor& x, const QuantizationParameters& q) {
  check_scale("dequantize", q.scale), check_zero_point("dequantize", q.zero_point);
  return dispatch1(PrimRef(new Dequantize(q)), operands(Tensor(x)));
}
Tensor quantized_linear(const Tensor& x, int x_zero_point, const Tensor& weight,
                        const Tensor& scale, const Tensor& bias, const QuantizedEpilogue& then) {
  return run_layer<QuantizedLinear>({}, x, x_zero_point, weight, scale, bias, then);
}
Tensor quantized_conv(const Tensor& x, int x_zero_point, const Tensor& weight, const Tensor& scale,
                      const Tensor& bias, const Window& window, const QuantizedEpilogue& then) {
  return run_layer<QuantizedConv>(window, x, x_zero_point, weight, scale, bias, then);
}
Tensor quantized_max_pool(const Tensor& x, const PoolAttributes::Windows& windows) {
  return dispatch1(PrimRef(new QuantizedMaxPool({windows})), operands(Tensor(x)));
}

// ---- samples

namespace {

Tensor sample_bytes(const Shape& shape, uint64_t key) {
  return cast(sample_integers(shape, 0, 256, key), kU8);
}

// Scales are powers of two and biases small integers and quarters, which 16-bit floats hold too.
std::vector<Tensor> layer_operands(const Shape& x, const Shape& w) {
  Tensor scale = cast(sample_integers({w[0]}, 1, 3, 3), kF64) * 0x1p-9,
         bias = cast(sample_integers({w[0]}, -40, 40, 4), kF64) * 0.25;
  return {sample_bytes(x, 1), sample_bytes(w, 2), scale, bias};
}

Form form_of(const Window& window, int x_zero_point, bool relu, int y_zero_point) {
  Form f;
  f.window = window, f.x_zero_point = x_zero_point, f.relu = relu, f.y_zero_point = y_zero_point;
  return f;
}

template <class Op>
Sample layer_sample(Form f, const Shape& x, const Shape& w, bool residual, bool quantized) {
  Sample s{nullptr, layer_operands(x, w), false};
  f.residual = residual, f.quantized = quantized;
  if (!quantized) f.y_zero_point = 0;
  if (residual) {
    f.residual_scale = 0.5, f.residual_zero_point = 7;
    SmallVector<const Meta*, 5> metas;
    for (const Tensor& t : s.in) metas.push_back(&t.meta());
    f.residual = false;
    Shape y = Op(QuantizedLayerAttributes{f}).infer(metas)[0].shape;
    f.residual = true;
    s.in.push_back(sample_bytes(y, 5));
  }
  s.prim = PrimRef(new Op(QuantizedLayerAttributes{f}));
  return s;
}

}  // namespace

void register_quantized_ops(OpRegistry& registry) {
  registry.add("quantize", [] {
    return std::vector<Sample>{
        {PrimRef(new Quantize({0.0125, 100})), {sample_values({3, 4, 5}, -2, 2, 1)}, false},
        {PrimRef(new Quantize({0.01, 0})), {sample_values({7}, -1, 3, 1)}, false}};
  });
  registry.add("dequantize", [] {
    return std::vector<Sample>{
        {PrimRef(new Dequantize({0.0125, 100})), {sample_bytes({3, 4, 5}, 1)}, false},
        {PrimRef(new Dequantize({0.01, 0})), {sample_bytes({7}, 1)}, false}};
  });
  registry.add("quantized_linear", [] {
    auto sample = layer_sample<QuantizedLinear>;
    return std::vector<Sample>{sample(form_of({}, 0, false, 0), {5, 8}, {6, 8}, false, true),
                               sample(form_of({}, 3, true, 0), {2, 3, 7}, {5, 7}, true, true),
                               sample(form_of({}, 128, false, 120), {4, 16}, {3, 16}, true, true),
                               sample(form_of({}, 9, false, 0), {4, 8}, {3, 8}, false, false)};
  });
  registry.add("quantized_conv", [] {
    auto sample = layer_sample<QuantizedConv>;
    const Window same{{1, 1}, {1, 1}, {1, 1}, {1, 1}, 1}, one{{1}, {1}, {0}, {1}, 1},
        stride{{2, 3}, {1, 2}, {1, 0}, {1, 0}, 1}, grouped{{1, 1}, {1, 1}, {0, 1}, {1, 0}, 2},
        cube{{1, 2, 1}, {1, 1, 1}, {1, 0, 1}, {0, 1, 1}, 1};
    return std::vector<Sample>{
        sample(form_of(same, 0, true, 0), {2, 3, 5, 4}, {4, 3, 3, 3}, true, true),
        sample(form_of(same, 117, false, 130), {2, 3, 5, 4}, {4, 3, 3, 3}, false, true),
        sample(form_of(stride, 5, false, 0), {3, 2, 6, 8}, {5, 2, 3, 2}, false, false),
        sample(form_of(grouped, 0, false, 64), {2, 4, 3, 4}, {6, 2, 2, 2}, true, true),
        sample(form_of(one, 0, true, 0), {2, 3, 8}, {2, 3, 2}, false, true),
        sample(form_of(cube, 2, false, 3), {2, 2, 3, 4, 3}, {3, 2, 2, 3, 2}, false, true)};
  });
  registry.add("quantized_max_pool", [] {
    PoolAttributes::Windows w{{2, 3}, {3, 2}, {2, 2}, {1, 1}, {1, 1}},
        line{{3}, {2}, {1}, {0}, {2}};
    return std::vector<Sample>{
        {PrimRef(new QuantizedMaxPool({w})), {sample_bytes({2, 3, 4, 5}, 1)}, false},
        {PrimRef(new QuantizedMaxPool({line})), {sample_bytes({2, 3, 5}, 1)}, false}};
  });
}

}  // namespace tessera
