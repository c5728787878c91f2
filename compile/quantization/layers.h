// Finds the layers of a recorded forward that can run on bytes, and the values that are then bytes.
// A layer is a convolution or a linear product with a constant weight, together with the ops after
// it that it absorbs: bias and normalisation by constants are folded into its weight and bias; then
// one residual and a relu may follow. Invariant: every absorbed node is read only by the next
// absorbed one, so a layer gives one value and nothing else of it is seen outside.
// Internal: not part of the public interface.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "compile/ir/graph.h"
#include "core/base/function_ref.h"
#include "core/ops/conv_attributes.h"
#include "core/tensor/named_tensor.h"

namespace tessera::quant {

using compiler::Graph;
using compiler::kNoValue;
using compiler::Node;
using compiler::ValueId;

struct Layer {
  std::string name;  // that of its weight's module: "layer1.0.conv1"
  bool linear = false;
  ConvAttributes::Window window;
  ValueId x = kNoValue, residual = kNoValue, y = kNoValue;
  Tensor weight, bias;  // f32 [O, ..], [O], with everything folded in
  bool folded = false;  // more than a bias
  bool relu = false;
};

/// A value that is rounded to bytes: the result of a layer, or an f32 value that a layer reads.
/// Values that views and pools make from it have the same scale.
struct Root {
  ValueId value = kNoValue;
  std::string name;  // "layer1.0.conv1", "input"
};

struct Layers {
  Graph graph;
  std::vector<Tensor> constant;  // by value: those that depend on no input
  std::vector<Layer> layers;
  std::vector<std::string> kept;  // layers that stay f32 because they were named
  std::vector<int> layer_at;      // by node: the layer that ends there, -1: none
  std::vector<bool> absorbed;     // by node: part of a layer
  std::vector<ValueId> root;      // by value: the root of its bytes; kNoValue: it stays f32
  std::vector<Root> roots;
};

/// Records `forward` of `x` without gradients and finds its layers, except those named in
/// `keep_f32`. `names`: the tensors of the model. Throws UserError for a forward that writes
/// memory.
Layers find_layers(FunctionRef<Tensor(const Tensor&)> forward, const Tensor& x,
                   std::vector<NamedTensor> names, std::span<const std::string> keep_f32);

/// Runs the recorded forward in f32 and hands each root's value to `see`. Returns the result.
Tensor run_observed(const Layers& layers, const Tensor& x,
                    FunctionRef<void(const Root&, const Tensor&)> see);

/// True for an op that can run on bytes unchanged: views, copies, relu and max-pools.
bool passes_bytes(const Node& node, const Graph& graph);

}  // namespace tessera::quant
