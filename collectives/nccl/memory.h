// Memory of a group of cards: NCCL allocates it, and all ranks register it with the communicator of
// their collectives, in one order, so that these read and write it in place. Invariant: it is
// deregistered before it is freed, and freed at the next allocation or with the group, when the
// card has done what was enqueued before its storage ended.
#pragma once
#include "collectives/nccl/communicator.h"
#include "core/tensor/event.h"
#include "core/tensor/memory_label.h"

namespace tessera::nccl {

class GroupCore;

struct OwnBlock {
  void* at = nullptr;
  size_t bytes = 0;
  Registration registration;
  Ref<Event> unused = nullptr;  // once its storage has ended: when the card has
};

/// What keeps a block for its storage.
class OwnMemory final : public RefCounted {
 public:
  OwnMemory(Ref<GroupCore> owner, const OwnBlock& block, const Stream& home);
  ~OwnMemory() override;

 private:
  const Ref<GroupCore> owner_;
  OwnBlock block_;
  const Stream home_;
  const MemoryHolder& holder_;
};

}  // namespace tessera::nccl
