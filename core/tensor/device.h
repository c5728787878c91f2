// Where a tensor's bytes are. A tensor on kMeta has none: it has a shape and a dtype and no values.
#pragma once
#include <cstdint>
#include <string>

namespace tessera {

/// The CPU, kMeta, and what register_device (device_runtime.h) has given a number.
enum class DeviceKind : uint8_t { kCPU, kMeta };
/// Kinds have numbers below this.
inline constexpr int kMaxDeviceKinds = 8;

struct Device {
  DeviceKind kind = DeviceKind::kCPU;
  int8_t index = 0;
  bool operator==(const Device&) const = default;
  bool is_cpu() const { return kind == DeviceKind::kCPU; }
  bool is_meta() const { return kind == DeviceKind::kMeta; }
};
inline constexpr Device kCPU{DeviceKind::kCPU, 0};
inline constexpr Device kMeta{DeviceKind::kMeta, 0};

/// "cpu", "cuda:0", "meta".
std::string to_string(Device d);
/// Parses what to_string prints, and "cuda" for "cuda:0". Throws UserError, which lists the kinds
/// of this build, for a kind that is not registered. Whether the device is there is checked where
/// it is used.
Device parse_device(const std::string& text);

}  // namespace tessera
