// Handles and descriptors of the virtual cuDNN. A descriptor is a list of attributes, of which each
// type has its own; finalizing checks them and, for operations, graphs and plans, makes of them
// what execution reads. Invariant: what is made owns what it says, so descriptors it came from may
// go.
#pragma once
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/backend/cuda/cudnn_api.h"
#include "tests/vgpu/cudnn/plan_text.h"

namespace tessera::cuda::dnn {
struct HandleObject {
  int device;
  StreamHandle stream;
};
}  // namespace tessera::cuda::dnn

namespace vgpu::dnn {

struct AttributeValue {
  int type = 0;
  int64_t count = 0;
  std::vector<char> bytes;
};

struct DescriptorObject {
  int type = 0;
  bool finished = false;
  std::map<int, AttributeValue> attributes;
  // What finalizing made, by type of descriptor.
  TensorInfo tensor;
  Operation operation;
  std::shared_ptr<const GraphInfo> graph;
  EngineInfo engine;      // of engines, configurations and plans
  int device = -1;        // of a plan: its handle's; -1: a described one
  DeviceProfile profile;  // of devices and plans

  bool has(int attribute) const { return attributes.contains(attribute); }
  template <class T>
  std::vector<T> list(int attribute) const {
    const auto it = attributes.find(attribute);
    if (it == attributes.end()) return {};
    std::vector<T> all(static_cast<size_t>(it->second.count));
    std::memcpy(all.data(), it->second.bytes.data(), all.size() * sizeof(T));
    return all;
  }
  template <class T>
  T value(int attribute, T otherwise = {}) const {
    const auto it = attributes.find(attribute);
    if (it != attributes.end()) std::memcpy(&otherwise, it->second.bytes.data(), sizeof(T));
    return otherwise;
  }
  const DescriptorObject* object(int attribute) const {
    return static_cast<const DescriptorObject*>(value<Descriptor>(attribute));
  }
};

/// Keeps what the thread's last error says; a caller's mistake is also printed.
Status refuse(Status status, const char* call, const std::string& why);
/// As refuse, for an answer that is no mistake: a graph that is not supported.
Status unsupported(const std::string& why, Status status = Status::kNotSupported);
/// The error that VGPU_FAIL asks of this call, else kSuccess.
Status requested(const char* call);
bool is_handle(Handle handle);
bool is_descriptor(const DescriptorObject* d);
/// Checks attributes and makes what the descriptor stands for.
Status finish(DescriptorObject& d);
/// Fills the suggestions of an ENGINEHEUR descriptor into configurations.
Status suggest(const DescriptorObject& heuristics, int64_t most, int64_t* count, void* places);

}  // namespace vgpu::dnn
