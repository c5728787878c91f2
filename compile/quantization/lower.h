// Lowers layers and scales to a graph on bytes. Invariant: the lowered graph computes what the
// recorded forward computes, but for the rounding of weights and of values to bytes.
// Internal: not part of the public interface.
#pragma once
#include <map>
#include <string>

#include "compile/quantization/layers.h"
#include "core/ops/quantized.h"

namespace tessera::quant {

/// The tensors of a layer: weight is u8 [O, ..], stored as value / weight_scale + 128; weight_scale
/// and bias are f32 [O].
struct LayerTensors {
  Tensor weight, weight_scale, bias;
};
/// What calibration and rounding decided, by the names of layers and of roots.
struct Decisions {
  std::map<std::string, LayerTensors> layers;
  std::map<std::string, QuantizationParameters> roots;
};

/// Rounds weights to bytes, separately for each output channel: its largest magnitude is 127 steps.
/// A channel whose largest magnitude is less than 1e-12 of the layer's, or than 1e-30, becomes
/// zeros.
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
  std::map<std::string, int> f32_ops;  // ops that are computed in f32, with their counts
};

/// Runs the recorded forward on bytes once and records it. Throws UserError for a layer or a value
/// that `decisions` lack.
Lowered lower(const Layers& layers, const Decisions& decisions, const Tensor& x);

}  // namespace tessera::quant
