#include "collectives/device_group.h"

#include <utility>
#include <vector>

#include "core/dispatch/call.h"
#include "core/dispatch/copy.h"
#include "core/tensor/device_runtime.h"

namespace tessera::detail {
namespace {

Device device_of(const Collective& c) {
  for (const Tensor& t : c.in)
    if (t.defined()) return t.device();
  for (const Tensor& t : c.out)
    if (t.defined()) return t.device();
  return kCPU;
}

// A call on copies of the tensors of another. What was one memory there is one copy here.
class Staged {
 public:
  template <class MakeCopy>
  Staged(const Collective& c, MakeCopy make_copy) : call_(c) {
    for (auto [from, to] : {std::pair{c.in, &in_}, {c.out, &out_}})
      for (const Tensor& t : from) to->push_back(t.defined() ? copy_of(t, make_copy) : t);
    call_.in = in_, call_.out = out_, call_.async = false;
  }
  Staged(const Staged&) = delete;
  const Collective& call() const { return call_; }
  const Tensor& out(size_t i) const { return out_[i]; }

 private:
  template <class MakeCopy>
  Tensor copy_of(const Tensor& t, MakeCopy make_copy) {
    for (const auto& [original, copy] : copies_)
      if (original.storage() == t.storage() && original.offset() == t.offset() &&
          same_layout(original.meta(), t.meta()))
        return copy;
    copies_.emplace_back(t, make_copy(t));
    return copies_.back().second;
  }
  std::vector<std::pair<Tensor, Tensor>> copies_;
  std::vector<Tensor> in_, out_;
  Collective call_;
};

}  // namespace

std::string_view DeviceGroup::backend(Device device) const {
  const Ref<ProcessGroup>& group = groups_[size_t(device.kind)];
  return group ? group->backend(device) : device.is_meta() ? "none" : cpu().backend();
}

bool DeviceGroup::supports(const Collective& c) const {
  const Device device = device_of(c);
  if (const Ref<ProcessGroup>& group = groups_[size_t(device.kind)]) return group->supports(c);
  if (device.is_meta()) return false;
  const Staged copies(c, [](const Tensor& t) { return empty(t.shape(), t.dtype(), kCPU); });
  return cpu().supports(copies.call());
}

Ref<Work> DeviceGroup::submit(const Collective& c) {
  const Device device = device_of(c);
  if (const Ref<ProcessGroup>& group = groups_[size_t(device.kind)]) return group->submit(c);
  TESSERA_CHECK(!device.is_meta(), "{}: tensors on meta have no values to send", name_of(c.kind));
  return submit_staged(c);
}

Ref<Work> DeviceGroup::submit_staged(const Collective& c) {
  // Results are copied too, since some verbs leave parts of them as they are.
  const Staged copies(c, [](const Tensor& t) { return transferred(t, kCPU); });
  Ref<Work> work = cpu().submit(copies.call());
  for (size_t i = 0; i < c.out.size(); ++i)
    if (c.out[i].defined()) {
      copy_values(c.out[i], transferred(copies.out(i), c.out[i].device()));
      c.out[i].storage()->bump_version();
    }
  return work;
}

Ref<Storage> DeviceGroup::allocate(size_t bytes, Device device) {
  if (const Ref<ProcessGroup>& group = groups_[size_t(device.kind)])
    return group->allocate(bytes, device);
  return make_ref<Storage>(bytes, device, allocator_of(device));
}

bool DeviceGroup::has_own_memory(Device device) const {
  const Ref<ProcessGroup>& group = groups_[size_t(device.kind)];
  return group && group->has_own_memory(device);
}

Ref<ProcessGroup> DeviceGroup::split(int color, int key, CallSite site) {
  ByKind parts;
  for (size_t d = 0; d < parts.size(); ++d)
    if (groups_[d]) parts[d] = groups_[d]->split(color, key, site);
  if (color < 0) return nullptr;
  return make_ref<DeviceGroup>(std::move(parts), publish_cause_);
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
