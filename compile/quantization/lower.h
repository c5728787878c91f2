// From layers and scales to a graph on bytes. Invariant: what is lowered computes what the recorded
// forward computes, but for the rounding of weights and of values to bytes.
#pragma once
#include <map>
#include <string>

#include "compile/quantization/layers.h"
#include "core/ops/quantized.h"

namespace tessera::quant {

/// weight is u8 [O, ..] around 128, of scale weight_scale [O] (f32); bias f32 [O].
struct LayerTensors {
  Tensor weight, weight_scale, bias;
};
/// Everything that calibration and rounding decided, by names of layers and of roots.
struct Decisions {
  std::map<std::string, LayerTensors> layers;
  std::map<std::string, QuantizationParameters> roots;
};

/// Weights rounded by output channel: the largest magnitude is 127 steps. A channel of less than
/// 1e-12 of the layer's largest, or than 1e-30, becomes zeros.
LayerTensors round_weights(const Layer& layer);

struct LoweredLayer {
  std::string name;
  PrimRef op;        // knows its kernel once it ran (QuantizedLayer::prepared)
  std::string x, y;  // names of roots; y is "" where the result is f32
  bool folded, residual, relu;
};
struct Lowered {
  Graph graph;
  std::vector<LoweredLayer> layers;
  std::vector<std::string> kept;       // layers in f32 by name
  std::map<std::string, int> f32_ops;  // what was computed in f32, and how often
};

/// Runs the recorded forward on bytes once, recording it. Throws UserError for a layer or a value
/// that `decisions` do not know.
Lowered lower(const Layers& layers, const Decisions& decisions, const Tensor& x);

}  // namespace tessera::quant
