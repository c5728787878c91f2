// What the statements about cuDNN share: descriptors by attributes, and a device that is described,
// so that graphs are compiled where no card is.
#pragma once
#include <cstring>
#include <map>

#include "tests/vgpu/conformance/fixture.h"

namespace vgpu_test {

using namespace tessera::cuda::dnn;  // NOLINT: the tests speak the library's language

using Numbers = std::vector<int64_t>;

/// As tests/golden/devices/h200.json.
inline constexpr const char* kDevice =
    R"({"maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
"regsPerBlock": 65536, "multiProcessorCount": 132, "smClockRateKHz": 1980000,
"memClockRateKHz": 3201000, "l2CacheSize": 62914560, "warpSize": 32,
"maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
"reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536, "pciDeviceId": 0,
"maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "isTccDriver": 0,
"supportCoopLaunch": 1, "driverVer": 13000, "deviceVer": 900, "cudaDeviceId": 0,
"totalGlobalMem": 150000000000, "deviceName": "NVIDIA H200", "name": "NVIDIA H200"})";

/// A descriptor, whose calls return what the library says.
struct Thing {
  Descriptor at = nullptr;
  explicit Thing(int type) {
    if (cudnn().make_descriptor(type, &at) != Status::kSuccess) at = nullptr;
  }
  ~Thing() {
    if (at) cudnn().destroy_descriptor(at);
  }
  Thing(Thing&& o) noexcept : at(o.at) { o.at = nullptr; }
  Thing(const Thing&) = delete;
  Status set(int attribute, int type, int64_t count, const void* values) {
    return cudnn().set_attribute(at, attribute, type, count, values);
  }
  Status set(int attribute, const Numbers& v) {
    return set(attribute, kTypeInt64, static_cast<int64_t>(v.size()), v.data());
  }
  Status set(int attribute, int64_t v) { return set(attribute, kTypeInt64, 1, &v); }
  Status set_kind(int attribute, int type, int v) { return set(attribute, type, 1, &v); }
  Status set_bool(int attribute, bool v) { return set(attribute, kTypeBoolean, 1, &v); }
  Status set(int attribute, const Thing& v) { return set(attribute, kTypeDescriptor, 1, &v.at); }
  Status finish() { return cudnn().finalize(at); }
};

struct Spec {
  int64_t uid;
  Numbers dims, strides;
  int type = kFloat;
  bool is_virtual = false;
  int64_t alignment = 16;
};
inline Thing unfinished_tensor(const Spec& s) {
  Thing t(kTensor);
  t.set_kind(kTensorType, kTypeDataType, s.type);
  t.set(kTensorDims, s.dims), t.set(kTensorStrides, s.strides);
  t.set(kTensorUid, s.uid), t.set(kTensorAlignment, s.alignment);
  if (s.is_virtual) t.set_bool(kTensorIsVirtual, true);
  return t;
}
inline Thing tensor(const Spec& s) {
  Thing t = unfinished_tensor(s);
  EXPECT_EQ(t.finish(), Status::kSuccess);
  return t;
}
inline Numbers dense(const Numbers& dims) {
  Numbers s(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) s[i - 1] = s[i] * dims[i];
  return s;
}
inline Numbers last(const Numbers& d) { return {d[1] * d[2] * d[3], 1, d[1] * d[3], d[1]}; }

inline Thing window(const Numbers& padding, const Numbers& stride, int type = kFloat) {
  Thing c(kConvolution);
  c.set_kind(kConvolutionType, kTypeDataType, type);
  c.set_kind(kConvolutionMode, kTypeConvolutionMode, kCrossCorrelation);
  c.set(kConvolutionDims, static_cast<int64_t>(stride.size()));
  c.set(kConvolutionBegin, padding), c.set(kConvolutionEnd, padding);
  c.set(kConvolutionStrides, stride), c.set(kConvolutionDilations, Numbers(stride.size(), 1));
  return c;
}
inline Thing unfinished_conv(const Thing& x, const Thing& w, const Thing& y, const Thing& window) {
  Thing op(kConvForwardOp);
  const float one = 1, zero = 0;
  op.set(kConvForwardX, x), op.set(kConvForwardW, w), op.set(kConvForwardY, y);
  op.set(kConvForwardWindow, window);
  op.set(kConvForwardAlpha, kTypeFloat, 1, &one), op.set(kConvForwardBeta, kTypeFloat, 1, &zero);
  return op;
}
inline Thing pointwise_kind(int mode) {
  Thing p(kPointwise);
  p.set_kind(kPointwiseMode, kTypePointwiseMode, mode);
  p.set_kind(kPointwisePrecision, kTypeDataType, kFloat);
  EXPECT_EQ(p.finish(), Status::kSuccess);
  return p;
}
inline Thing unfinished_pointwise(const Thing& kind, const Thing& x, const Thing* b,
                                  const Thing& y) {
  Thing op(kPointwiseOp);
  op.set(kPointwiseOpKind, kind), op.set(kPointwiseOpX, x), op.set(kPointwiseOpY, y);
  if (b) op.set(kPointwiseOpB, *b);
  return op;
}

inline Thing device() {
  Thing d(kDeviceProperties);
  EXPECT_EQ(d.set(kDeviceJson, kTypeChar, static_cast<int64_t>(std::strlen(kDevice)), kDevice),
            Status::kSuccess);
  EXPECT_EQ(d.finish(), Status::kSuccess);
  return d;
}
inline Thing unfinished_graph(const std::vector<const Thing*>& ops) {
  Thing g(kOperationGraph);
  std::vector<Descriptor> all;
  for (const Thing* op : ops) all.push_back(op->at);
  g.set(kGraphOps, kTypeDescriptor, static_cast<int64_t>(all.size()), all.data());
  return g;
}
/// What the library suggests for a graph; `device` is nullptr where the graph has a handle.
inline std::vector<Thing> suggestions(const Thing& graph, const Thing* device,
                                      int mode = kHeuristicA) {
  Thing h(kHeuristics);
  h.set(kHeuristicsGraph, graph), h.set_kind(kHeuristicsMode, kTypeHeuristicMode, mode);
  if (device) h.set(kHeuristicsDevice, *device);
  int64_t count = 0;
  std::vector<Thing> all;
  std::vector<Descriptor> places;
  if (h.finish() != Status::kSuccess ||
      cudnn().get_attribute(h.at, kHeuristicsResults, kTypeDescriptor, 0, &count, nullptr) !=
          Status::kSuccess)
    return all;
  for (int64_t i = 0; i < count; ++i) all.emplace_back(kEngineConfig);
  for (const Thing& t : all) places.push_back(t.at);
  const Status s = cudnn().get_attribute(h.at, kHeuristicsResults, kTypeDescriptor, count, &count,
                                         places.data());
  EXPECT_EQ(s, Status::kSuccess);
  return all;
}
/// The plan of a suggestion, not finished.
inline Thing unfinished_plan(const Thing& config, const Thing& device) {
  Thing p(kPlan);
  p.set(kPlanConfig, config), p.set(kPlanDevice, device);
  return p;
}
/// How many of the suggestions compile.
inline int compiling(const Thing& graph, const Thing& device) {
  int good = 0;
  for (int mode : {kHeuristicA, kHeuristicFallback})
    for (const Thing& config : suggestions(graph, &device, mode))
      good += unfinished_plan(config, device).finish() == Status::kSuccess;
  return good;
}

/// With a handle on the stream.
class CudnnOnDevice : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (const std::string why = why_no_cudnn(); !why.empty()) GTEST_SKIP() << why;
    ASSERT_EQ(cudnn().create(&handle), Status::kSuccess);
    ASSERT_EQ(cudnn().set_stream(handle, stream), Status::kSuccess);
  }
  void TearDown() override {
    OnDevice::TearDown();
    if (handle) {
      EXPECT_EQ(cudnn().destroy(handle), Status::kSuccess);
    }
  }
  Handle handle = nullptr;
};

}  // namespace vgpu_test
