// Starting the virtual driver, its devices and contexts, and what every call begins with.
#include <algorithm>
#include <cstring>

#include "tests/vgpu/cuda/api.h"

namespace vgpu {

namespace {

bool initialised = false;
std::array<ContextObject, 64> contexts;
thread_local ContextObject* current = nullptr;

int device_attribute(DeviceAttribute attribute, bool* known) {
  *known = true;
  switch (attribute) {  // an H200's, but for the number of multiprocessors
    case DeviceAttribute::kMaxThreadsPerBlock: return 1024;
    case DeviceAttribute::kMaxGridX: return 2147483647;
    case DeviceAttribute::kMaxGridY: return 65535;
    case DeviceAttribute::kMaxGridZ: return 65535;
    case DeviceAttribute::kSharedBytesPerBlock: return 48 << 10;
    case DeviceAttribute::kWarpSize: return 32;
    case DeviceAttribute::kClockKilohertz: return 1980000;
    case DeviceAttribute::kMultiprocessors: return 4;
    case DeviceAttribute::kMemoryClockKilohertz: return 3201000;
    case DeviceAttribute::kMemoryBusBits: return 6144;
    case DeviceAttribute::kL2Bytes: return 60 << 20;
    case DeviceAttribute::kMaxThreadsPerMultiprocessor: return 2048;
    case DeviceAttribute::kUnifiedAddressing: return 1;
    case DeviceAttribute::kCapabilityMajor: return 9;
    case DeviceAttribute::kCapabilityMinor: return 0;
    case DeviceAttribute::kSharedBytesPerMultiprocessor: return 228 << 10;
    case DeviceAttribute::kSharedBytesPerBlockOptIn: return kVgpuDynamicBytes;
    case DeviceAttribute::kVirtualMemory: return 1;
  }
  *known = false;
  return 0;
}

Result check_device(const char* call, DeviceOrdinal device) {
  const auto count = static_cast<int>(gpu().devices.size());
  if (device >= 0 && device < count) return Result::kSuccess;
  return refuse(Result::kInvalidDevice, call,
                "device " + std::to_string(device) + " of " + std::to_string(count));
}

}  // namespace

Result refuse(Result result, const char* call, const std::string& why) {
  std::fprintf(stderr, "vgpu: %s: %s\n", call, why.c_str());
  return result;
}
std::string text(uint64_t n) { return std::to_string(n); }

ContextObject* current_context() { return current; }

Result may_call(const char* call) {
  if (in_host_function())
    return refuse(Result::kNotPermitted, call, "a function of the host in a stream calls nothing");
  if (!initialised) return refuse(Result::kNotInitialized, call, "before cuInit");
  return Result::kSuccess;
}
Result device_error(int device) { return gpu().devices[static_cast<size_t>(device)].error; }

}  // namespace vgpu

namespace tessera::cuda {

using namespace vgpu;

extern "C" {

Result cuInit(unsigned flags) {
  if (flags) return refuse(Result::kInvalidValue, __func__, "flags are 0");
  if (gpu().devices.empty()) return Result::kNoDevice;
  initialised = true;
  return Result::kSuccess;
}
Result cuDriverGetVersion(int* version) { return *version = 13000, Result::kSuccess; }

Result cuGetErrorName(Result error, const char** name) {
  switch (error) {
#define RESULT(ours, vendor, value) \
  case Result::ours:                \
    *name = #vendor;                \
    return Result::kSuccess;
#include "core/backend/cuda/driver_constants.def"
  }
  return *name = nullptr, Result::kInvalidValue;
}
Result cuGetErrorString(Result error, const char** text) {
  switch (error) {
    case Result::kSuccess: *text = "no error"; break;
    case Result::kInvalidValue: *text = "invalid argument"; break;
    case Result::kOutOfMemory: *text = "out of memory"; break;
    case Result::kNotReady: *text = "device not ready"; break;
    case Result::kIllegalAddress: *text = "an illegal memory access was encountered"; break;
    case Result::kInvalidContext: *text = "invalid device context"; break;
    case Result::kInvalidHandle: *text = "invalid resource handle"; break;
    case Result::kNotFound: *text = "named symbol not found"; break;
    case Result::kLaunchFailed: *text = "unspecified launch failure"; break;
    case Result::kMisalignedAddress: *text = "misaligned address"; break;
    case Result::kNoDevice: *text = "no CUDA-capable device is detected"; break;
    default: return cuGetErrorName(error, text);
  }
  return Result::kSuccess;
}

Result cuDeviceGetCount(int* count) {
  return in_driver(__func__, [&] {
    *count = static_cast<int>(gpu().devices.size());
    return Result::kSuccess;
  });
}
Result cuDeviceGet(DeviceOrdinal* device, int index) {
  return in_driver(__func__, [&] { return *device = index, check_device("cuDeviceGet", index); });
}
Result cuDeviceGetName(char* name, int bytes, DeviceOrdinal device) {
  return in_driver(__func__, [&] {
    std::snprintf(name, static_cast<size_t>(bytes), "virtual GPU");
    return check_device("cuDeviceGetName", device);
  });
}
Result cuDeviceGetUuid_v2(Uuid* uuid, DeviceOrdinal device) {
  return in_driver(__func__, [&] {
    std::memset(uuid->bytes, 0, sizeof(uuid->bytes));
    std::memcpy(uuid->bytes, "vgpu", 4);
    uuid->bytes[15] = static_cast<char>(device);
    return check_device("cuDeviceGetUuid_v2", device);
  });
}
Result cuDeviceTotalMem_v2(size_t* bytes, DeviceOrdinal device) {
  return in_driver(__func__, [&] {
    *bytes = gpu().settings.memory_bytes;
    return check_device("cuDeviceTotalMem_v2", device);
  });
}
Result cuDeviceGetAttribute(int* value, DeviceAttribute attribute, DeviceOrdinal device) {
  return in_driver(__func__, [&] {
    bool known;
    *value = device_attribute(attribute, &known);
    if (!known)
      return refuse(
          Result::kInvalidValue, "cuDeviceGetAttribute",
          "attribute " + std::to_string(static_cast<int>(attribute)) + " is not emulated");
    return check_device("cuDeviceGetAttribute", device);
  });
}
Result cuDeviceGetPCIBusId(char* id, int bytes, DeviceOrdinal device) {
  return in_driver(__func__, [&] {
    std::snprintf(id, static_cast<size_t>(bytes), "0000:%02x:00.0", device + 1);
    return check_device("cuDeviceGetPCIBusId", device);
  });
}
Result cuDeviceCanAccessPeer(int* can, DeviceOrdinal device, DeviceOrdinal peer) {
  return in_driver(__func__, [&] {
    *can = device != peer;
    const Result r = check_device("cuDeviceCanAccessPeer", device);
    return r == Result::kSuccess ? check_device("cuDeviceCanAccessPeer", peer) : r;
  });
}

Result cuDevicePrimaryCtxRetain(ContextHandle* context, DeviceOrdinal device) {
  return in_driver(__func__, [&] {
    if (const Result r = check_device("cuDevicePrimaryCtxRetain", device); r != Result::kSuccess)
      return r;
    *context = &contexts[static_cast<size_t>(device)];
    (*context)->device = device, ++(*context)->retained;
    return Result::kSuccess;
  });
}
Result cuDevicePrimaryCtxRelease_v2(DeviceOrdinal device) {
  return in_driver(__func__, [&] {
    if (const Result r = check_device("cuDevicePrimaryCtxRelease", device); r != Result::kSuccess)
      return r;
    if (contexts[static_cast<size_t>(device)].retained == 0)
      return refuse(Result::kInvalidContext, "cuDevicePrimaryCtxRelease", "nobody retains it");
    --contexts[static_cast<size_t>(device)].retained;
    return Result::kSuccess;
  });
}
Result cuCtxSetCurrent(ContextHandle context) {
  return in_driver(__func__, [&] {
    if (context && !context->retained)
      return refuse(Result::kInvalidContext, "cuCtxSetCurrent", "nobody retains it");
    current = context;
    return Result::kSuccess;
  });
}
Result cuCtxGetCurrent(ContextHandle* context) {
  return in_driver(__func__, [&] { return *context = current, Result::kSuccess; });
}
Result cuCtxSynchronize() {
  return in_context(__func__, [&](int device) {
    if (const Result r = forbidden_in_capture("cuCtxSynchronize"); r != Result::kSuccess) return r;
    gpu().wait_for_all(device);
    return device_error(device);
  });
}
Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return in_context(__func__, [&](int) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return Result::kSuccess;
  });
}
Result cuCtxEnablePeerAccess(ContextHandle peer, unsigned flags) {
  return in_context(__func__, [&](int device) {
    if (flags) return refuse(Result::kInvalidValue, "cuCtxEnablePeerAccess", "flags are 0");
    if (!peer || !peer->retained) return Result::kInvalidContext;
    if (peer->device == device)
      return refuse(Result::kInvalidDevice, "cuCtxEnablePeerAccess",
                    "a device is not its own peer");
    uint64_t& peers = gpu().devices[static_cast<size_t>(device)].peers;
    if (peers >> peer->device & 1) return Result::kPeerAccessAlreadyEnabled;
    peers |= uint64_t{1} << peer->device;
    for (auto& [at, block] : gpu().memory.blocks().alive())
      if (block.zones && block.device == peer->device) block.access |= uint64_t{1} << device;
    return Result::kSuccess;
  });
}
}

}  // namespace tessera::cuda
