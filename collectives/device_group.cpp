#include "collectives/device_group.h"

namespace tessera::detail {
namespace {

Device device_of(const Collective& c) {
  for (const Tensor& t : c.in)
    if (t.defined()) return t.device();
  for (const Tensor& t : c.out)
    if (t.defined()) return t.device();
  return kCPU;
}

}  // namespace

DeviceGroup::DeviceGroup(Ref<ProcessGroup> cpu, Ref<ProcessGroup> cuda, PublishCause publish_cause)
    : publish_cause_(std::move(publish_cause)) {
  groups_[int(DeviceKind::kCPU)] = std::move(cpu);
  groups_[int(DeviceKind::kCUDA)] = std::move(cuda);
}

std::string_view DeviceGroup::backend(Device device) const {
  const Ref<ProcessGroup>& group = groups_[size_t(device.kind)];
  return group ? group->backend(device) : "none";
}

bool DeviceGroup::supports(const Collective& c) const {
  const Ref<ProcessGroup>& group = groups_[size_t(device_of(c).kind)];
  return group && group->supports(c);
}

Ref<Work> DeviceGroup::submit(const Collective& c) {
  Device device = device_of(c);
  const Ref<ProcessGroup>& group = groups_[size_t(device.kind)];
  TESSERA_CHECK(group, "{}: no collective backend for {} in this build; move the tensor to the cpu",
                name_of(c.kind), to_string(device));
  return group->submit(c);
}

Ref<ProcessGroup> DeviceGroup::split(int color, int key, CallSite site) {
  std::array<Ref<ProcessGroup>, kNumDeviceKinds> parts;
  for (size_t d = 0; d < parts.size(); ++d)
    if (groups_[d]) parts[d] = groups_[d]->split(color, key, site);
  if (color < 0) return nullptr;
  return make_ref<DeviceGroup>(parts[int(DeviceKind::kCPU)], parts[int(DeviceKind::kCUDA)],
                               publish_cause_);
}

void DeviceGroup::abort(const std::string& why) {
  for (const Ref<ProcessGroup>& group : groups_)
    if (group) group->abort(why);
  if (!publish_cause_) return;
  try {
    barrier();
  } catch (const CommError& first) {  // the error that killed the group, by this abort or before it
    if (!first.culprits().empty()) publish_cause_(first.culprits());
  }
}

void DeviceGroup::flush() {
  for (const Ref<ProcessGroup>& group : groups_)
    if (group) group->flush();
}

}  // namespace tessera::detail
