// Copies and fills. Pageable memory is staged before the call returns, and a copy into it is waited
// for, as the driver does; pinned memory is used when the copy runs, and closed until then.
#include <algorithm>
#include <cstring>

#include "tests/vgpu/cuda/api.h"

namespace vgpu {

void use_range(DevicePtr at, size_t bytes, VgpuAccess kind, int device) {
  Gpu& g = gpu();
  if (!g.memory.contains(at))
    throw OpError(Result::kIllegalAddress, g.running()->name + ": not device memory");
  const Life* life = nullptr;
  const std::string wrong = g.memory.refuses(at, bytes, g.running()->number, device, &life);
  if (!wrong.empty()) throw OpError(Result::kIllegalAddress, g.running()->name + ": " + wrong);
  if (g.shadow) try {
      g.shadow->touch_range(at, bytes, kind, device);
    } catch (const OpError& e) {
      throw OpError(e.result, g.running()->name + ": " + e.what());
    }
}

}  // namespace vgpu

namespace tessera::cuda {

using namespace vgpu;

namespace {

void* address(DevicePtr at) { return reinterpret_cast<void*>(at); }

/// One side of a copy that lies in host memory.
struct HostSide {
  const void* at;
  bool pinned;
  explicit HostSide(const void* p) : at(p), pinned(gpu().pinned.find(p) != nullptr) {}
};
Result check_host(const char* call, const StreamObject& s, const HostSide& side) {
  if (gpu().memory.contains(side.at))
    return refuse(Result::kInvalidValue, call, "the host's side is device memory");
  if (s.capture && !side.pinned)
    return refuse(Result::kStreamCaptureUnsupported, call,
                  "pageable memory in a captured copy: pin it");
  return Result::kSuccess;
}
// The call returns when the copy has ended.
void wait_for_pageable(const OpRef& op) {
  ++gpu().calls["wait for a copy to pageable memory"];
  gpu().wait_for(op);
}
// The op that runs has what it uses of a pinned buffer for itself.
template <class F>
void with_open(const void* pinned, size_t bytes, F&& body) {
  gpu().pinned.open(pinned, bytes);
  body();
  gpu().pinned.close(pinned, bytes);
}

template <class T>
Result fill(const char* call, DevicePtr to, T value, size_t count, StreamHandle stream) {
  return on_stream(call, stream, [&](StreamObject& s) {
    if (to % sizeof(T)) return refuse(Result::kInvalidValue, call, "misaligned address");
    if (!count) return Result::kSuccess;
    enqueue(s, OpKind::kMemset, "fill", [=, device = s.device] {
      use_range(to, count * sizeof(T), kVgpuWrite, device);
      std::fill_n(static_cast<T*>(address(to)), count, value);
    });
    return Result::kSuccess;
  });
}

/// A side of a 2D copy: rows of `width` bytes, `pitch` apart.
struct Rows {
  int type;
  char* first;
  size_t pitch;
  size_t bytes(size_t width, size_t height) const { return (height - 1) * pitch + width; }
};
void use_rows(const Rows& rows, size_t width, size_t height, VgpuAccess kind, int device) {
  if (rows.type != kMemoryTypeDevice) return;
  for (size_t y = 0; y < height; ++y)
    use_range(reinterpret_cast<DevicePtr>(rows.first + y * rows.pitch), width, kind, device);
}
void copy_rows(const Rows& to, const Rows& from, size_t width, size_t height) {
  for (size_t y = 0; y < height; ++y)
    std::memcpy(to.first + y * to.pitch, from.first + y * from.pitch, width);
}

}  // namespace

extern "C" {

Result cuMemcpyHtoDAsync_v2(DevicePtr to, const void* from, size_t bytes, StreamHandle stream) {
  return on_stream(__func__, stream, [&](StreamObject& s) {
    const HostSide host(from);
    if (const Result r = check_host("cuMemcpyHtoDAsync", s, host); r != Result::kSuccess) return r;
    if (!bytes) return Result::kSuccess;
    std::shared_ptr<std::vector<char>> staged;
    if (!host.pinned) {
      const char* p = static_cast<const char*>(from);
      staged = std::make_shared<std::vector<char>>(p, p + bytes);
    }
    std::vector<Op::HostBuffer> buffers;
    if (host.pinned) buffers.push_back({from, bytes, false});
    enqueue(
        s, OpKind::kMemcpy, "copy to the device",
        [=, device = s.device] {
          use_range(to, bytes, kVgpuWrite, device);
          if (staged)
            std::memcpy(address(to), staged->data(), bytes);
          else
            with_open(from, bytes, [&] { std::memcpy(address(to), from, bytes); });
        },
        buffers);
    return Result::kSuccess;
  });
}
Result cuMemcpyDtoHAsync_v2(void* to, DevicePtr from, size_t bytes, StreamHandle stream) {
  return on_stream(__func__, stream, [&](StreamObject& s) {
    const HostSide host(to);
    if (const Result r = check_host("cuMemcpyDtoHAsync", s, host); r != Result::kSuccess) return r;
    if (!bytes) return Result::kSuccess;
    std::vector<Op::HostBuffer> buffers;
    if (host.pinned) buffers.push_back({to, bytes, true});
    const OpRef op = enqueue(
        s, OpKind::kMemcpy, "copy to the host",
        [=, device = s.device] {
          use_range(from, bytes, kVgpuRead, device);
          if (!host.pinned)
            std::memcpy(to, address(from), bytes);
          else
            with_open(to, bytes, [&] { std::memcpy(to, address(from), bytes); });
        },
        buffers);
    if (!host.pinned) wait_for_pageable(op);
    return device_error(s.device);
  });
}
Result cuMemcpyDtoDAsync_v2(DevicePtr to, DevicePtr from, size_t bytes, StreamHandle stream) {
  return on_stream(__func__, stream, [&](StreamObject& s) {
    if (!bytes) return Result::kSuccess;
    enqueue(s, OpKind::kMemcpy, "copy on the device", [=, device = s.device] {
      use_range(from, bytes, kVgpuRead, device);
      use_range(to, bytes, kVgpuWrite, device);
      std::memmove(address(to), address(from), bytes);
    });
    return Result::kSuccess;
  });
}
Result cuMemcpyPeerAsync(DevicePtr to, ContextHandle to_context, DevicePtr from,
                         ContextHandle from_context, size_t bytes, StreamHandle stream) {
  return on_stream(__func__, stream, [&](StreamObject& s) {
    if (!to_context || !from_context) return Result::kInvalidContext;
    if (!bytes) return Result::kSuccess;
    enqueue(s, OpKind::kMemcpy, "copy between devices",
            [=, there = to_context->device, here = from_context->device] {
              use_range(from, bytes, kVgpuRead, here);
              use_range(to, bytes, kVgpuWrite, there);
              std::memcpy(address(to), address(from), bytes);
            });
    return Result::kSuccess;
  });
}
Result cuMemcpy2DAsync_v2(const Memcpy2D* c, StreamHandle stream) {
  return on_stream(__func__, stream, [&](StreamObject& s) {
    const auto is_known = [](int type) {
      return type == kMemoryTypeHost || type == kMemoryTypeDevice;
    };
    if (!is_known(c->source_type) || !is_known(c->target_type))
      return refuse(Result::kInvalidValue, "cuMemcpy2DAsync",
                    "emulated are host and device memory");
    if (c->width_bytes == 0 || c->height == 0) return Result::kSuccess;
    const size_t last_row = c->height > 1 ? c->width_bytes : 0;
    if (c->source_pitch < last_row || c->target_pitch < last_row)
      return refuse(Result::kInvalidValue, "cuMemcpy2DAsync", "rows are wider than their pitch");
    const auto first = [](int type, const void* host, DevicePtr device, size_t offset) {
      return (type == kMemoryTypeHost ? static_cast<char*>(const_cast<void*>(host))
                                      : static_cast<char*>(address(device))) +
             offset;
    };
    Rows from{c->source_type,
              first(c->source_type, c->source_host, c->source_device,
                    c->source_y * c->source_pitch + c->source_x_bytes),
              c->source_pitch};
    const Rows to{c->target_type,
                  first(c->target_type, c->target_host, c->target_device,
                        c->target_y * c->target_pitch + c->target_x_bytes),
                  c->target_pitch};
    std::vector<Op::HostBuffer> buffers;
    std::shared_ptr<std::vector<char>> staged;
    bool wait = false;
    const size_t width = c->width_bytes, height = c->height;
    if (from.type == kMemoryTypeHost) {
      const HostSide host(from.first);
      if (const Result r = check_host("cuMemcpy2DAsync", s, host); r != Result::kSuccess) return r;
      if (host.pinned) {
        buffers.push_back({from.first, from.bytes(width, height), false});
      } else {
        staged = std::make_shared<std::vector<char>>(width * height);
        copy_rows({0, staged->data(), width}, from, width, height);
        from = {kMemoryTypeHost, staged->data(), width};
      }
    }
    if (to.type == kMemoryTypeHost) {
      const HostSide host(to.first);
      if (const Result r = check_host("cuMemcpy2DAsync", s, host); r != Result::kSuccess) return r;
      if (host.pinned) buffers.push_back({to.first, to.bytes(width, height), true});
      wait = !host.pinned;
    }
    const OpRef op = enqueue(
        s, OpKind::kMemcpy, "copy of rows",
        [=, device = s.device] {
          use_rows(from, width, height, kVgpuRead, device);
          use_rows(to, width, height, kVgpuWrite, device);
          with_open(from.first, from.bytes(width, height), [&] {
            with_open(to.first, to.bytes(width, height),
                      [&] { copy_rows(to, from, width, height); });
          });
          (void)staged;
        },
        buffers);
    if (wait) wait_for_pageable(op);
    return device_error(s.device);
  });
}

Result cuMemsetD8Async(DevicePtr to, unsigned char value, size_t count, StreamHandle stream) {
  return fill(__func__, to, value, count, stream);
}
Result cuMemsetD16Async(DevicePtr to, unsigned short value, size_t count, StreamHandle stream) {
  return fill(__func__, to, value, count, stream);
}
Result cuMemsetD32Async(DevicePtr to, unsigned value, size_t count, StreamHandle stream) {
  return fill(__func__, to, value, count, stream);
}
}

}  // namespace tessera::cuda
