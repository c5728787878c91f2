#include "collectives/nccl/group.h"

#include "collectives/nccl/core.h"

namespace tessera::nccl {

detail::Membership members_beside(const ProcessGroup& cpu) {
  detail::Membership m{
      .group = cpu.name() + " (cuda)", .rank = cpu.rank(), .size = cpu.size(), .world_ranks = {}};
  for (int r = 0; r < cpu.size(); ++r) m.world_ranks.push_back(cpu.global_rank(r));
  return m;
}

Communicators with_messages(std::unique_ptr<Communicator> first, int rank,
                            const Communicator::Pause& pause) {
  Communicators all;
  for (size_t i = 1; first && i < all.size(); ++i) all[i] = first->split(0, rank, pause);
  all[0] = std::move(first);
  return all;
}

NcclGroup::NcclGroup(detail::Membership members, GroupContext context, Device device,
                     Communicators communicators)
    : members_(std::move(members)),
      context_(std::move(context)),
      core_(make_ref<GroupCore>(members_, context_, device, std::move(communicators))) {}

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
  Communicators communicators = core_->split(alone ? -1 : color, key);
  if (alone) return nullptr;
  return Ref<CardGroup>(
      new NcclGroup(members_beside(*part), context_, core_->device(), std::move(communicators)));
}

void NcclGroup::abort(const std::string& why) { core_->abort(why); }
void NcclGroup::flush() { core_->flush(); }
void NcclGroup::submit_messages() { core_->submit_put_off(); }

Ref<Storage> NcclGroup::allocate(size_t bytes, OnAll on_all) {
  return core_->allocate(bytes, on_all);
}
bool NcclGroup::has_own_memory(Device device) const { return device == core_->device(); }

}  // namespace tessera::nccl
