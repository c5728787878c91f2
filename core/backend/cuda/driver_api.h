// The part of the CUDA driver API (libcuda) and of NVRTC (libnvrtc) that Tessera uses, declared by
// Tessera itself, so that a build without a toolkit contains the CUDA backend. The functions are
// the rows of driver_functions.def and nvrtc_functions.def. Invariant: each row, constant and
// struct agrees with the vendor's headers; tests/cuda/vendor_headers.cpp proves it where those are.
#pragma once
#include <cstddef>

namespace tessera::cuda {

enum class Result : int {
#define RESULT(name, vendor, value) name = value,
#include "core/backend/cuda/driver_constants.def"
};
enum class DeviceAttribute : int {
#define DEVICE_ATTRIBUTE(name, vendor, value) name = value,
#include "core/backend/cuda/driver_constants.def"
};
enum class FunctionAttribute : int {
#define FUNCTION_ATTRIBUTE(name, vendor, value) name = value,
#include "core/backend/cuda/driver_constants.def"
};
enum class NodeType : int {
#define NODE_TYPE(name, vendor, value) name = value,
#include "core/backend/cuda/driver_constants.def"
};
// Flags and the values of small enumerations.
#define CONSTANT(name, vendor, value) inline constexpr int name = value;
#include "core/backend/cuda/driver_constants.def"

/// An address in the memory of a device.
using DevicePtr = unsigned long long;  // NOLINT(google-runtime-int): the vendor's type
/// A device by its number among those that the driver shows.
using DeviceOrdinal = int;
/// Physical memory that cuMemCreate made.
using MemoryHandle = unsigned long long;  // NOLINT(google-runtime-int): the vendor's type

// What the driver hands out. The objects belong to it.
using ContextHandle = struct ContextObject*;
using StreamHandle = struct StreamObject*;
using EventHandle = struct EventObject*;
using ModuleHandle = struct ModuleObject*;
using FunctionHandle = struct FunctionObject*;
using GraphHandle = struct GraphObject*;
using NodeHandle = struct NodeObject*;
using GraphExecHandle = struct GraphExecObject*;
using ProgramHandle = struct ProgramObject*;  // of NVRTC

using HostFunction = void (*)(void* data);

struct Uuid {
  char bytes[16];
};

struct MemoryLocation {
  int type;  // kLocationDevice
  int id;    // the device's number
};
struct AllocationProperties {
  int type;          // kAllocationPinned
  int handle_types;  // 0: not shared with other processes
  MemoryLocation location;
  void* win32_metadata;
  struct {
    unsigned char compression, gpu_direct_rdma;
    unsigned short usage;  // NOLINT(google-runtime-int): the vendor's type
    unsigned char reserved[4];
  } flags;
};
struct AccessDescription {
  MemoryLocation location;
  int flags;  // kAccessReadWrite
};

/// A copy of `height` rows of `width_bytes`; each side is in host memory or in device memory.
struct Memcpy2D {
  size_t source_x_bytes, source_y;
  int source_type;
  const void* source_host;
  DevicePtr source_device;
  void* source_array;
  size_t source_pitch;
  size_t target_x_bytes, target_y;
  int target_type;
  void* target_host;
  DevicePtr target_device;
  void* target_array;
  size_t target_pitch;
  size_t width_bytes, height;
};

struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    int number;
    unsigned cluster[3];
    void* pointer;
  } value;
};
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  StreamHandle stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

struct KernelNodeParams {
  FunctionHandle function;
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void** parameters;
  void** extra;
  void* kernel;  // used where `function` is null, which it never is here
  ContextHandle context;
};
struct GraphUpdateInfo {
  int result;  // 0: the graph was updated
  NodeHandle error_node, error_from_node;
};

enum class NvrtcResult : int {
  kSuccess = 0,
  kOutOfMemory = 1,
  kProgramCreationFailure = 2,
  kInvalidInput = 3,
  kInvalidProgram = 4,
  kInvalidOption = 5,
  kCompilation = 6,
  kInternalError = 11,
};

}  // namespace tessera::cuda
