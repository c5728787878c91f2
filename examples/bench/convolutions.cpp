#include "examples/bench/convolutions.h"

#include <fmt/core.h>

#include <unordered_map>

#include "core/backend/cpu/onednn.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/primitive/primitive_of.h"

namespace tessera::bench {
namespace {

using Into = Convolution::Into;
using Sizes = dnnl::memory::dims;
using Description = dnnl::memory::desc;

using cpu::engine;

dnnl::memory::data_type type_of(const Convolution& c) {
  return c.bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

Description activations(const Convolution& c, const Shape& shape) {
  Strides s = channels_last_strides(shape);
  return {Sizes(shape.begin(), shape.end()), type_of(c), Sizes(s.begin(), s.end())};
}

Description weights(const Convolution& c) {
  Sizes sizes(c.w.begin(), c.w.end());
  if (c.window.groups > 1) {
    sizes[0] /= c.window.groups;
    sizes.insert(sizes.begin(), c.window.groups);
  }
  return {sizes, type_of(c), dnnl::memory::format_tag::any};
}

}  // namespace

double Convolution::flops() const {
  double places = double(numel(y)) / double(y[1]);  // samples times positions of the output
  return 2 * places * double(numel(w));
}

std::string Convolution::text() const {
  const char* name = into == Into::kY ? "conv" : into == Into::kX ? "conv dx" : "conv dw";
  const auto& v = window;
  return fmt::format(
      "{} {}, x {}, w {}, y {}, stride {}, dilation {}, padding {} and {}, {} groups",
      bf16 ? "bf16" : "f32", name, to_string(x), to_string(w), to_string(y), to_string(v.stride),
      to_string(v.dilation), to_string(v.pad_begin), to_string(v.pad_end), v.groups);
}

std::optional<Convolution> convolution_of(const Primitive& prim, std::span<const Tensor> in) {
  const std::string_view name = prim.name();
  const bool y = name == "conv", x = name == "conv_grad_input", w = name == "conv_grad_weight";
  if (!(y || x || w) || (in[0].dtype() != kF32 && in[0].dtype() != kBF16)) return std::nullopt;
  const Meta* metas[] = {&in[0].meta(), &in[1].meta()};
  const Shape out = prim.infer({metas, 2})[0].shape;
  Convolution c;
  c.window = attributes_of<ConvAttributes>(prim).window;
  c.bf16 = in[0].dtype() == kBF16;
  if (y)
    c.into = Into::kY, c.x = in[0].shape(), c.w = in[1].shape(), c.y = out;
  else if (x)
    c.into = Into::kX, c.x = out, c.w = in[1].shape(), c.y = in[0].shape();
  else
    c.into = Into::kW, c.x = in[1].shape(), c.w = out, c.y = in[0].shape();
  return c;
}

struct BareConvolution::State {
  dnnl::stream stream{engine()};
  dnnl::primitive primitive;
  std::string implementation;
  std::vector<Tensor> buffers;
  std::unordered_map<int, dnnl::memory> arguments;

  explicit State(const Convolution& c) {
    const Description x = activations(c, c.x), y = activations(c, c.y), w = weights(c);
    const auto& v = c.window;
    Sizes stride(v.stride.begin(), v.stride.end()), begin(v.pad_begin.begin(), v.pad_begin.end()),
        end(v.pad_end.begin(), v.pad_end.end()), gaps;
    for (int64_t d : v.dilation) gaps.push_back(d - 1);
    const auto direct = dnnl::algorithm::convolution_direct;
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    const auto forward = cpu::description_of<dnnl::convolution_forward>(
        attr, dnnl::prop_kind::forward_training, direct, x, w, y, stride, gaps, begin, end);
    if (c.into == Into::kY) {
      prepare(c, dnnl::convolution_forward(forward), forward, forward.weights_desc(), x, y);
    } else if (c.into == Into::kX) {
      const auto d = cpu::backward_description_of<dnnl::convolution_backward_data>(
          attr, forward, direct, x, w, y, stride, gaps, begin, end);
      prepare(c, dnnl::convolution_backward_data(d), d, d.weights_desc(), x, y);
    } else {
      const auto d = cpu::backward_description_of<dnnl::convolution_backward_weights>(
          attr, forward, direct, x, w, y, stride, gaps, begin, end);
      prepare(c, dnnl::convolution_backward_weights(d), d, d.diff_weights_desc(), x, y);
    }
  }

  template <class PrimitiveDescription>
  void prepare(const Convolution& c, dnnl::primitive p, const PrimitiveDescription& d,
               const Description& w, const Description& x, const Description& y) {
    primitive = std::move(p);
    implementation = d.impl_info_str();
    add(c.into == Into::kX ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC, x, c.bf16);
    add(c.into == Into::kW ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS, w, c.bf16);
    add(c.into == Into::kY ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST, y, c.bf16);
    add(DNNL_ARG_SCRATCHPAD, d.scratchpad_desc(), false);
  }
  void add(int argument, const Description& d, bool bf16) {
    const DType dtype = bf16 ? kBF16 : kF32;
    buffers.push_back(rand({int64_t(d.get_size() / size_of(dtype) + 16)}).to(dtype));
    arguments.emplace(argument, dnnl::memory(d, engine(), buffers.back().raw()));
  }
};

BareConvolution::BareConvolution(const Convolution& c) : state_(std::make_unique<State>(c)) {}
BareConvolution::~BareConvolution() = default;
BareConvolution::BareConvolution(BareConvolution&&) noexcept = default;
void BareConvolution::run() { state_->primitive.execute(state_->stream, state_->arguments); }
std::string BareConvolution::implementation() const { return state_->implementation; }

}  // namespace tessera::bench
