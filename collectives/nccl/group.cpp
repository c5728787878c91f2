#include "collectives/nccl/group.h"

#include "collectives/nccl/core.h"
#include "core/tensor/device_runtime.h"

namespace tessera::nccl {

detail::Membership members_beside(const ProcessGroup& cpu) {
  detail::Membership m{
      .group = cpu.name() + " (cuda)", .rank = cpu.rank(), .size = cpu.size(), .world_ranks = {}};
  for (int r = 0; r < cpu.size(); ++r) m.world_ranks.push_back(cpu.global_rank(r));
  return m;
}

NcclGroup::NcclGroup(detail::Membership members, GroupContext context, Device device,
                     std::unique_ptr<Communicator> communicator)
    : members_(std::move(members)),
      context_(std::move(context)),
      core_(make_ref<GroupCore>(members_, context_, device, std::move(communicator))) {}

NcclGroup::~NcclGroup() { core_->close(); }

bool NcclGroup::supports(const Collective& c) const {
  if (!traits(c.kind).reduces) return true;
  for (auto tensors : {c.in, c.out})
    for (const Tensor& t : tensors)
      if (t.defined() && !has_operator(c.op, t.dtype())) return false;
  return true;
}

Ref<Work> NcclGroup::submit(const Collective& c) {
  for (auto tensors : {c.in, c.out})
    for (const Tensor& t : tensors)
      TESSERA_CHECK(!t.defined() || t.device() == core_->device(),
                    "{}: a tensor is on {}, but this rank's part of {} is on {}; a rank uses one "
                    "card, that of the group's first call",
                    name_of(c.kind), to_string(t.device()), members_.group,
                    to_string(core_->device()));
  return core_->submit(c);
}

Ref<detail::CardGroup> NcclGroup::split_beside(const ProcessGroup* part, int color, int key) {
  const bool alone = !part || part->size() == 1;
  auto communicator = core_->split(alone ? -1 : color, key);
  if (alone) return nullptr;
  return Ref<CardGroup>(
      new NcclGroup(members_beside(*part), context_, core_->device(), std::move(communicator)));
}

void NcclGroup::abort(const std::string& why) { core_->abort(why); }
void NcclGroup::flush() { core_->flush(); }

Ref<Storage> NcclGroup::allocate(size_t bytes, Device device) {
  return make_ref<Storage>(bytes, device, allocator_of(device));
}

}  // namespace tessera::nccl
