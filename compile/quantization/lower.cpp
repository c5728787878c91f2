#include "compile/quantization/lower.h"

#include "compile/passes/passes.h"
#include "compile/record/trace.h"
#include "core/autograd/autograd.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/target.h"
#include "core/ops/create.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/pool_attributes.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

namespace tessera::quant {
namespace {

// Walks the recorded forward. Each value is computed in f32, as bytes, or both where both are read.
class Lowering {
 public:
  Lowering(const Layers& from, const Decisions& decisions, Lowered& to)
      : from_(from), g_(from.graph), decisions_(decisions), to_(to), f32_(from.constant) {
    bytes_.resize(g_.values.size());
    names_.resize(g_.values.size());
    for (const Root& r : from.roots) names_[size_t(r.value)] = r.name;
    for (ValueId id : g_.shapes) f32_[size_t(id)] = Tensor(g_[id].meta, nullptr);
  }

  Tensor run(const Tensor& x) {
    for (const Layer& l : from_.layers) tensors_of(l);  // an error names a layer before its values
    f32_[size_t(g_.inputs[0])] = x;
    for (size_t k = 0; k < g_.nodes.size(); ++k) {
      const Node& n = g_.nodes[k];
      if (from_.layer_at[k] >= 0)
        run_layer(from_.layers[size_t(from_.layer_at[k])]);
      else if (!from_.absorbed[k] && !from_.constant[size_t(n.out[0])].defined())
        run_node(n);
    }
    return in_f32(g_.outputs[0]);
  }

 private:
  const std::string& root_name(ValueId id) const { return names_[size_t(from_.root[size_t(id)])]; }
  const QuantizationParameters& parameters(ValueId id) const {
    auto it = decisions_.roots.find(root_name(id));
    TESSERA_CHECK(it != decisions_.roots.end(),
                  "quantized model: {} was not seen in calibration; calibrate with inputs like "
                  "this one",
                  root_name(id));
    return it->second;
  }

  const LayerTensors& tensors_of(const Layer& layer) const {
    auto it = decisions_.layers.find(layer.name);
    TESSERA_CHECK(
        it != decisions_.layers.end(),
        "quantized model: the state has no layer {}; name it in keep_f32 if it was kept in "
        "f32, or calibrate with inputs like this one",
        layer.name);
    return it->second;
  }

  const Tensor& in_f32(ValueId id) {
    Tensor& t = f32_[size_t(id)];
    if (!t.defined()) t = dequantize(bytes_[size_t(id)], parameters(id));
    return t;
  }
  const Tensor& in_bytes(ValueId id) {
    Tensor& t = bytes_[size_t(id)];
    if (!t.defined()) t = quantize(f32_[size_t(id)], parameters(id));
    return t;
  }

  void run_node(const Node& n) {
    const bool bytes =
        from_.root[size_t(n.out[0])] != kNoValue && from_.root[size_t(n.out[0])] != n.out[0];
    if (bytes) {
      bytes_[size_t(n.out[0])] = passed(n, in_bytes(n.in[0]));
      return;
    }
    Tensors in;
    for (ValueId id : n.in) in.push_back(in_f32(id));
    if (!n.prim->is_view()) ++to_.f32_ops[std::string(n.prim->name())];
    Tensors out = dispatch(n.prim, in);
    for (size_t i = 0; i < n.out.size(); ++i) f32_[size_t(n.out[i])] = out[i];
  }
  Tensor passed(const Node& n, const Tensor& x) const {
    const std::string_view op = n.prim->name();
    if (op == "max_pool")
      return quantized_max_pool(x, attributes_of<PoolAttributes>(*n.prim).windows);
    if (op == "relu") return maximum(x, int64_t(parameters(n.in[0]).zero_point));
    Tensor in[] = {x};
    return dispatch1(n.prim, in);
  }

  // Runs `make` outside of the recording: its result becomes an implicit input of the graph.
  static Tensor outside(FunctionRef<Tensor()> make) {
    EagerScope eager;
    return make();
  }

  void run_layer(const Layer& layer) {
    const LayerTensors& t = tensors_of(layer);
    TESSERA_CHECK_AS(ShapeError, t.weight.shape() == layer.weight.shape(),
                     "quantized model: layer {} has a weight {}, the model's is {}", layer.name,
                     describe(t.weight), to_string(layer.weight.shape()));
    const bool bytes = from_.root[size_t(layer.y)] == layer.y;
    const QuantizationParameters& x = parameters(layer.x);
    const QuantizationParameters y = bytes ? parameters(layer.y) : QuantizationParameters{};
    QuantizedEpilogue then{
        .relu = layer.relu, .quantized = bytes, .y_zero_point = y.zero_point, .constant = true};
    if (layer.residual != kNoValue) {
      const QuantizationParameters& r = parameters(layer.residual);
      then.residual = in_bytes(layer.residual);
      then.residual_scale = r.scale / y.scale, then.residual_zero_point = r.zero_point;
    }
    const Tensor scale = outside([&] { return t.weight_scale * (x.scale / y.scale); }),
                 bias = outside([&] { return t.bias * (1 / y.scale); });
    const Tensor& from = in_bytes(layer.x);
    Tensor out = layer.linear ? quantized_linear(from, x.zero_point, t.weight, scale, bias, then)
                              : quantized_conv(from, x.zero_point, t.weight, scale, bias,
                                               layer.window, then);
    (bytes ? bytes_ : f32_)[size_t(layer.y)] = out;
    to_.layers.push_back({layer.name, nullptr, root_name(layer.x), bytes ? layer.name : "",
                          layer.folded, layer.residual != kNoValue, layer.relu});
  }

  const Layers& from_;
  const Graph& g_;
  const Decisions& decisions_;
  Lowered& to_;
  std::vector<Tensor> f32_, bytes_;
  std::vector<std::string> names_;
};

}  // namespace

// A channel that is negligible beside the others becomes zeros in steps of the largest channel. In
// its own steps the bias would overflow.
LayerTensors round_weights(const Layer& layer) {
  constexpr double kLeast = 1e-30, kLeastBeside = 1e-12;
  const Tensor rows = reshape(layer.weight, {layer.weight.shape()[0], -1});
  const Tensor largest = amax(abs(rows), {1});
  const double most = amax(largest).item<double>();
  const Tensor zero_steps = full(largest.shape(), most > kLeast ? most / 127 : 1.0);
  const Tensor steps =
      where(gt(largest, std::max(kLeast, most * kLeastBeside)), largest / 127.0, zero_steps);
  Shape beside = Dims::filled(layer.weight.ndim(), 1);
  beside[0] = steps.numel();
  Tensor whole = clamp(round(layer.weight / reshape(steps, beside)), -127.0, 127.0);
  return {cast(whole + double(kWeightZeroPoint), kU8), steps, layer.bias};
}

Lowered lower(const Layers& layers, const Decisions& decisions, const Tensor& given) {
  NoGrad no_history;
  Lowered lowered;
  const Tensor x = given.detach();
  compiler::Trace trace({.inputs = {x}});
  const Tensor y = Lowering(layers, decisions, lowered).run(x);
  lowered.graph = trace.finish({y});
  lowered.kept = layers.kept;
  size_t next = 0;
  for (const Node& n : lowered.graph.nodes)
    if (n.prim->name() == "quantized_conv" || n.prim->name() == "quantized_linear")
      lowered.layers[next++].op = n.prim;
  compiler::eliminate_dead_code(lowered.graph);
  return lowered;
}

}  // namespace tessera::quant
