// The group that programs hold: one backend group for each kind of device. The tensors of a call
// decide which one runs it, so a program names no backend. Tensors of a device that has no backend
// are copied to the CPU, whose group then runs the call. Invariant: on every device, the members
// are the same ranks in the same order.
#pragma once
#include <array>
#include <functional>

#include "collectives/process_group.h"

namespace tessera::detail {

class DeviceGroup final : public ProcessGroup {
 public:
  /// Called with the ranks of the world that an aborted group failed on.
  using PublishCause = std::function<void(std::span<const int> world_ranks)>;
  /// A backend group for each DeviceKind, null where there is none.
  using ByKind = std::array<Ref<ProcessGroup>, kMaxDeviceKinds>;
  /// That of the CPU, which is always there, also serves calls without tensors. `publish_cause` may
  /// be null.
  DeviceGroup(ByKind groups, PublishCause publish_cause)
      : groups_(std::move(groups)), publish_cause_(std::move(publish_cause)) {}

  int rank() const override { return cpu().rank(); }
  int size() const override { return cpu().size(); }
  const std::string& name() const override { return cpu().name(); }
  std::string_view backend(Device device) const override;
  bool supports(const Collective& c) const override;
  Ref<Work> submit(const Collective& c) override;
  Ref<ProcessGroup> split(int color, int key, CallSite site) override;
  void abort(const std::string& why) override;
  void flush() override;
  Ref<Storage> allocate(size_t bytes, Device device) override;
  bool has_own_memory(Device device) const override;
  int global_rank(int r) const override { return cpu().global_rank(r); }
  Millis timeout() const override { return cpu().timeout(); }
  void working(std::string_view what) override { cpu().working(what); }

 private:
  /// Runs `c`, whose tensors are on a device, on copies of them; the calling thread waits for it.
  Ref<Work> submit_staged(const Collective& c);
  ProcessGroup& cpu() const { return *groups_[int(DeviceKind::kCPU)]; }
  const ByKind groups_;
  const PublishCause publish_cause_;
};

}  // namespace tessera::detail
