// Quantised layers on the CPU: oneDNN's convolutions and products of u8 with s8, activations
// channels-last, everything that follows the sum in the library's epilogue. Weights are packed and
// code is generated once for an op and kept with it (QuantizedLayer::keep). Invariant:
// sums do not saturate, so without dot instructions for bytes, where the library's would at 16
// bits, the op's decomposition into f32 kernels runs instead: its sums are exact below 2^24.
#include <algorithm>
#include <oneapi/dnnl/dnnl.hpp>

#include "core/backend/cpu/channels_last.h"
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/quantize_table.h"
#include "core/backend/cpu/onednn.h"
#include "core/backend/cpu/onednn_scaling.h"
#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/base/boundary.h"
#include "core/base/log.h"
#include "core/dispatch/context.h"
#include "core/ops/quantized_layer.h"

namespace tessera::cpu {
namespace {

using Data = dnnl::memory::data_type;
using Tag = dnnl::memory::format_tag;
using Sizes = dnnl::memory::dims;
using Desc = dnnl::memory::desc;
using Layer = QuantizedLayer;

constexpr int64_t kGrain = 1 << 16;

// ---- between f32 and u8

// Results lie as x does.
void plan_quantize(const Primitive&, std::span<const Tensor> in, std::span<Meta> out, Plan& plan) {
  if (is_channels_last(in[0].shape(), in[0].strides()))
    out[0].strides = channels_last_strides(in[0].shape());
  else
    plan.dense_in = 1;
}

void run_quantize(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                  Workspace, const Stream&) {
  const auto& a = attributes_of<QuantizationParameters>(prim);
  Tensor wide = in[0];
  if (wide.dtype() != kF32) {
    Meta m = in[0].meta();
    m.dtype = kF32;
    wide = empty(m);
    convert_same_layout(in[0], wide);
  }
  const float* x = wide.values<float>();
  uint8_t* y = out[0].data<uint8_t>();
  parallel_for("quantize.threads", out[0].numel(), kGrain, [&](int64_t begin, int64_t end) {
    simd<QuantizeTable>().quantize(x + begin, y + begin, end - begin, float(1 / a.scale),
                                   a.zero_point);
  });
}

void run_dequantize(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                    Workspace, const Stream&) {
  const auto& a = attributes_of<QuantizationParameters>(prim);
  const uint8_t* x = in[0].values<uint8_t>();
  float* y = out[0].data<float>();
  parallel_for("dequantize.threads", out[0].numel(), kGrain, [&](int64_t begin, int64_t end) {
    simd<QuantizeTable>().dequantize(x + begin, y + begin, end - begin, float(a.scale),
                                     a.zero_point);
  });
}

// ---- layers

bool has_byte_dot() {
  static const bool has = [] {
    switch (dnnl::get_effective_cpu_isa()) {
      case dnnl::cpu_isa::avx512_core_vnni:
      case dnnl::cpu_isa::avx512_core_bf16:
      case dnnl::cpu_isa::avx512_core_amx:
#if DNNL_VERSION_MAJOR >= 3
      case dnnl::cpu_isa::avx512_core_fp16:
      case dnnl::cpu_isa::avx512_core_amx_fp16:
      case dnnl::cpu_isa::avx2_vnni_2:
#endif
      case dnnl::cpu_isa::avx2_vnni: return true;
      default:
        logging::warn(
            "quantized layers: no dot instructions for bytes (VNNI) on this CPU; they are computed "
            "in f32, no faster than without quantization");
        return false;
    }
  }();
  return has;
}

Data data_type(DType t) { return t == kU8 ? Data::u8 : Data::f32; }

// A linear layer takes x as rows [M, K].
Sizes sizes_of(const Meta& m, bool rows) {
  const Shape& s = m.shape;
  if (!rows) return Sizes(s.begin(), s.end());
  const int64_t last = s[s.size() - 1];
  return {last ? numel(s) / last : 0, last};
}
Desc activations(const Meta& m, bool rows) {
  if (rows) return {sizes_of(m, true), data_type(m.dtype), Tag::ab};
  Strides st = channels_last_strides(m.shape);
  return {sizes_of(m, false), data_type(m.dtype), Sizes(st.begin(), st.end())};
}

// An operand by its memory, which is held so that nothing else comes to lie there.
struct Constant {
  Ref<Storage> storage;
  int64_t offset;
  uint32_t version;
  explicit Constant(const Tensor& t)
      : storage(t.storage()), offset(t.offset()), version(storage->version()) {}
  bool is(const Tensor& t) const {
    return t.storage() == storage && t.offset() == offset && storage->version() == version;
  }
};

class Prepared final : public PreparedLayer {
 public:
  Prepared(const Layer& layer, std::span<const Tensor> in, const Meta& y)
      : weight_(in[1]),
        scale_(in[2]),
        bias_(in[3]),
        x_shape_(in[0].shape()),
        threads_(num_threads()) {
    const Layer::Form& f = layer.form;
    rows_ = layer.spatial() == 0;
    x_ = activations(in[0].meta(), rows_), y_ = activations(y, rows_);
    if (f.residual) residual_ = activations(in[4].meta(), rows_);
    const dnnl::primitive_attr attr = attributes(layer, in[2], in[3]);
    if (rows_)
      make_product(attr, in[1]);
    else
      make_convolution(f.window, attr, in[1]);
  }
  std::string kernel() const override { return kernel_; }
  bool fits(std::span<const Tensor> in) const {
    return weight_.is(in[1]) && scale_.is(in[2]) && bias_.is(in[3]) && x_shape_ == in[0].shape() &&
           threads_ == num_threads();
  }

  void run(const Tensor& x, const Tensor& residual, const Tensor& y) const {
    Tensor work = empty({int64_t(std::max<size_t>(scratch_.get_size(), 1))}, kU8);
    auto memory = [](const Desc& d, const void* data) {
      return dnnl::memory(d, engine(), const_cast<void*>(data));
    };
    const dnnl::memory x_m = memory(x_, x.raw_values()), y_m = memory(y_, y.raw()),
                       w_m = memory(w_, packed_.raw_values()),
                       b_m = memory(b_, scaling_.bias().raw_values()),
                       s_m = memory(scratch_, work.raw()),
                       r_m = residual.defined() ? memory(residual_, residual.raw_values())
                                                : dnnl::memory();
    dnnl_exec_arg_t args[6 + LayerScaling::kMost] = {{DNNL_ARG_SRC, x_m.get()},
                                                     {DNNL_ARG_WEIGHTS, w_m.get()},
                                                     {DNNL_ARG_BIAS, b_m.get()},
                                                     {DNNL_ARG_DST, y_m.get()},
                                                     {DNNL_ARG_SCRATCHPAD, s_m.get()}};
    int count = 5;
    if (residual.defined())
      args[count++] = {DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1, r_m.get()};
    count += scaling_.operands(args + count);
    dnnl_status_t status = dnnl_primitive_execute(primitive_.get(), stream().get(), count, args);
    TESSERA_ASSERT(status == dnnl_success, "oneDNN {} failed with status {}", kernel_, int(status));
  }

 private:
  // A residual joins after the scale, in units of its own, so the scale before it is in these too.
  dnnl::primitive_attr attributes(const Layer& layer, const Tensor& given_scale,
                                  const Tensor& given_bias) {
    const Layer::Form& f = layer.form;
    const Tensor scale = converted(given_scale, kF32), bias = converted(given_bias, kF32);
    const int64_t n = scale.numel();
    const float unit = f.residual ? float(f.residual_scale) : 1.0f;
    b_ = rows_ ? Desc({1, n}, Data::f32, Tag::ab) : Desc({n}, Data::f32, Tag::a);
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    const int outputs = rows_ ? 0b10 : f.window.groups > 1 ? 0b11 : 0b01;  // dims of packed weights
    scaling_ =
        LayerScaling(attr, scale, bias, unit, outputs, int(f.x_zero_point), int(f.y_zero_point));
    dnnl::post_ops then;
    if (f.residual) {
      then.append_binary(dnnl::algorithm::binary_add, residual_);
      append_eltwise(then, dnnl::algorithm::eltwise_linear, unit,
                     -unit * float(f.residual_zero_point));
    }
    // Saturation at 0 is a relu already where 0 stands for 0.
    if (f.relu && !(f.quantized && f.y_zero_point == 0))
      append_eltwise(then, dnnl::algorithm::eltwise_relu, 0, 0);
    attr.set_post_ops(then);
    return attr;
  }

  void make_product(const dnnl::primitive_attr& attr, const Tensor& weight) {
    const int64_t n = weight.shape()[0], k = weight.shape()[1];
    const auto pd =
        description_of<dnnl::matmul>(attr, x_, Desc({k, n}, Data::s8, Tag::any), b_, y_);
    primitive_ = dnnl::matmul(pd);
    finish(pd, Desc({k, n}, Data::s8, Sizes{1, k}), weight);
  }

  void make_convolution(const ConvAttributes::Window& w, const dnnl::primitive_attr& attr,
                        const Tensor& weight) {
    const Shape& s = weight.shape();
    Sizes sizes(s.begin(), s.end()), strides, gaps;
    if (w.groups > 1) sizes[0] /= w.groups, sizes.insert(sizes.begin(), w.groups);
    int64_t step = 1;
    for (size_t i = sizes.size(); i-- > 0; step *= sizes[i]) strides.insert(strides.begin(), step);
    for (int64_t d : w.dilation) gaps.push_back(d - 1);
    const auto pd = description_of<dnnl::convolution_forward>(
        attr, dnnl::prop_kind::forward_inference, dnnl::algorithm::convolution_direct, x_,
        Desc(sizes, Data::s8, Tag::any), b_, y_, Sizes(w.stride.begin(), w.stride.end()), gaps,
        Sizes(w.pad_begin.begin(), w.pad_begin.end()), Sizes(w.pad_end.begin(), w.pad_end.end()));
    primitive_ = dnnl::convolution_forward(pd);
    finish(pd, Desc(sizes, Data::s8, strides), weight);
  }

  template <class PrimitiveDesc>
  void finish(const PrimitiveDesc& pd, const Desc& user, const Tensor& weight) {
    kernel_ = pd.impl_info_str();
    w_ = pd.weights_desc(), scratch_ = pd.scratchpad_desc();
    // s8 bits of u8 around 128.
    Tensor bytes = empty(weight.shape(), kU8);
    const uint8_t* from = weight.values<uint8_t>();
    uint8_t* to = bytes.data<uint8_t>();
    for (int64_t i = 0; i < weight.numel(); ++i) to[i] = from[i] ^ 0x80;
    packed_ = empty({int64_t(w_.get_size())}, kU8);
    dnnl::memory in(user, engine(), to), out(w_, engine(), packed_.raw());
    dnnl::reorder(in, out).execute(stream(), in, out);
  }

  Constant weight_, scale_, bias_;
  Shape x_shape_;
  int threads_;
  bool rows_ = false;
  dnnl::primitive primitive_;
  Desc x_, w_, b_, y_, residual_, scratch_;
  Tensor packed_;
  LayerScaling scaling_;
  std::string kernel_;
};

void check_scale(const Tensor& given) {
  const Tensor scale = converted(given, kF32);
  for (int64_t o = 0; o < scale.numel(); ++o)
    TESSERA_CHECK(scale.values<float>()[o] > 0,
                  "quantized layer: scale[{}] is {}; it must be positive", o,
                  scale.values<float>()[o]);
}

struct InF32 final : PreparedLayer {
  std::string kernel() const override { return "f32, for want of VNNI"; }
};

void plan_layer(const Primitive& prim, std::span<const Tensor>, std::span<Meta> out, Plan& plan) {
  const bool rows = static_cast<const Layer&>(prim).spatial() == 0;
  if (!rows) out[0].strides = channels_last_strides(out[0].shape);
  plan.dense_in = rows ? 0b11111 : 0b01110;
}

void run_layer(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
               Workspace, const Stream&) {
  const auto& layer = static_cast<const Layer&>(prim);
  if (out[0].numel() == 0) return;
  if (!has_byte_dot() || in[0].numel() == 0) {
    check_scale(in[2]);
    if (!has_byte_dot() && !layer.prepared()) layer.keep(std::make_shared<InF32>());
    Scoped<LayerMask> below_all_layers(context().enabled, 0);
    EagerScope eager;
    return copy_values(out[0], prim.decompose(in)[0]);
  }
  auto kept = std::static_pointer_cast<const Prepared>(layer.prepared());
  if (!kept || !layer.form.constant || !kept->fits(in)) {
    check_scale(in[2]);
    kept = std::make_shared<Prepared>(layer, in, out[0].meta());
    layer.keep(kept);
  }
  auto lying = [&](const Tensor& t) { return layer.spatial() ? as_channels_last(t) : t; };
  kept->run(lying(in[0]), layer.form.residual ? lying(in[4]) : Tensor(), out[0]);
}

// ---- pooling

void plan_max_pool(const Primitive&, std::span<const Tensor>, std::span<Meta> out, Plan&) {
  out[0].strides = channels_last_strides(out[0].shape);
}

// The library's padding behind is what its windows reach beyond x.
void run_max_pool(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                  Workspace, const Stream&) {
  if (out[0].numel() == 0) return;
  const PoolAttributes::Windows& w = attributes_of<QuantizedPoolAttributes>(prim).windows;
  const Tensor x = as_channels_last(in[0]);
  Sizes kernel(w.kernel.begin(), w.kernel.end()), stride(w.stride.begin(), w.stride.end()), gaps,
      begin(w.padding.begin(), w.padding.end()), end;
  for (int i = 0; i < w.spatial(); ++i) {
    gaps.push_back(w.dilation[i] - 1);
    end.push_back((w.windows[i] - 1) * w.stride[i] + w.dilation[i] * (w.kernel[i] - 1) + 1 -
                  x.shape()[i + 2] - w.padding[i]);
  }
  const Desc from = activations(x.meta(), false), to = activations(out[0].meta(), false);
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const auto pd = description_of<PoolingForward>(attr, dnnl::prop_kind::forward_inference,
                                                 dnnl::algorithm::pooling_max, from, to, stride,
                                                 kernel, gaps, begin, end);
  Tensor work = empty({int64_t(std::max<size_t>(pd.scratchpad_desc().get_size(), 1))}, kU8);
  PoolingForward(pd).execute(stream(),
                             {{DNNL_ARG_SRC, {from, engine(), const_cast<void*>(x.raw_values())}},
                              {DNNL_ARG_DST, {to, engine(), out[0].raw()}},
                              {DNNL_ARG_SCRATCHPAD, {pd.scratchpad_desc(), engine(), work.raw()}}});
}

}  // namespace

void register_quantized(KernelTable& t) {
  t.add(DeviceKind::kCPU, "quantize", {plan_quantize, run_quantize});
  t.add(DeviceKind::kCPU, "dequantize", {plan_quantize, run_dequantize});
  t.add(DeviceKind::kCPU, "quantized_max_pool", {plan_max_pool, run_max_pool});
  for (const char* op : {"quantized_linear", "quantized_conv"})
    t.add(DeviceKind::kCPU, op, {plan_layer, run_layer});
}

}  // namespace tessera::cpu
