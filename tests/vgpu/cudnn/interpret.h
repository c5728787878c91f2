// Computes a graph of the virtual cuDNN, operation by operation, in f32.
#pragma once
#include <map>

#include "tests/vgpu/cudnn/graph.h"

namespace vgpu::dnn {

/// `at`: where each tensor with memory is; `numbers`: those that are given by value. `turn` counts
/// calls, for the engine whose sums have no fixed order.
void interpret(const GraphInfo& graph, int64_t engine, const std::map<int64_t, void*>& at,
               const std::map<int64_t, float>& numbers, unsigned turn);

}  // namespace vgpu::dnn
