// Graphs of the virtual cuDNN: operations on tensors, which graphs there are, and how engines
// differ. No pattern is matched: a graph is what its operations say, one after the other.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/backend/cuda/cudnn_api.h"

namespace vgpu::dnn {

using namespace tessera::cuda;       // NOLINT: the fake is the vendor's side of these names
using namespace tessera::cuda::dnn;  // NOLINT

using Extents = std::vector<int64_t>;

struct TensorInfo {
  int64_t uid = 0;
  Extents dims, strides;
  int type = kFloat;
  int64_t alignment = 0;
  bool is_virtual = false, by_value = false;

  int64_t count() const;
};

struct Operation {
  int kind = 0;      // its descriptor's type
  int mode = 0;      // of pointwise operations and reductions; of statistics: 1 sums squares
  int64_t axis = 0;  // of positions
  Extents begin, end, stride, dilation;
  std::vector<TensorInfo> in;
  TensorInfo out;
  TensorInfo squares;  // of statistics, which a graph has as two operations

  bool is_conv() const {
    return kind == kConvForwardOp || kind == kConvDataOp || kind == kConvFilterOp;
  }
};

struct GraphInfo {
  std::vector<Operation> operations;               // each after those whose results it takes
  std::vector<TensorInfo> read, written, numbers;  // with memory; by value
  /// "convolution", "convolution_data", "convolution_filter", "products" or "operations": what the
  /// driver's counters know it by, behind "cudnn ".
  std::string name;
};

struct EngineInfo {
  int64_t index = -1;
  int64_t knob = 0;
};
/// What tells engines apart.
struct EngineKind {
  int64_t index;
  int note;  // numerical; -1: none
  size_t workspace;
  bool only_f32 = false;  // suggested for graphs of f32 alone
  bool compiles = true;
};
/// In the order of suggestions: VGPU_CUDNN_FIRST=INDEX moves one to the front.
std::vector<EngineKind> engines(bool fallback);
const EngineKind* engine_kind(int64_t index);
/// Whether VGPU_CUDNN_SLOW, numbers between commas, has the engine.
bool is_slow(int64_t index);

int64_t bytes_of(int type);
/// "" or why no library would take the operation.
std::string wrong(const Operation& op);
/// Puts operations in order and finds what has memory; "" or what is wrong.
std::string join(GraphInfo& graph);
/// "" or why no engine computes it, though nothing is wrong with it.
std::string unsupported_by_all(const GraphInfo& graph);
bool is_f32(const GraphInfo& graph);

}  // namespace vgpu::dnn
