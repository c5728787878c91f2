// The group of ranks that have a card each: NCCL moves their tensors. A call waits on a stream of
// the group's for the kernels that its tensors come from, and kernels that use the results wait for
// it: no host thread waits, not for synchronous verbs either. A thread beside the program watches
// the calls: it names ranks that do not come, and aborts NCCL, whose own waits have no end.
// Receives and asynchronous sends are put off until a result is used, a call that is no message
// follows, or 20 ms have passed: those that are submitted together proceed together. Invariant:
// collectives are submitted in the order of the calls; after a failure nothing is, and every wait
// of the host for values that passed through the group throws.
#pragma once
#include <array>

#include "collectives/device_group.h"
#include "collectives/engine.h"
#include "collectives/nccl/communicator.h"
#include "collectives/store/store.h"
#include "collectives/watchdog.h"

namespace tessera::nccl {

namespace detail = ::tessera::detail;

/// What a group of cards needs beside its communicator.
struct GroupContext {
  std::shared_ptr<detail::Watchdog> watchdog;
  std::shared_ptr<Store> store;
  std::string prefix;  // of its keys, which end with the group's name
  Millis timeout{0};
};

/// The communicators of a group: for collectives, for messages to higher ranks, and to lower ones.
using Communicators = std::array<std::unique_ptr<Communicator>, 3>;
/// Divides `first` into those of all its ranks.
Communicators with_messages(std::unique_ptr<Communicator> first, int rank,
                            const Communicator::Pause& pause);

class GroupCore;

class NcclGroup final : public detail::CardGroup {
 public:
  NcclGroup(detail::Membership members, GroupContext context, Device device,
            Communicators communicators);
  ~NcclGroup() override;

  int rank() const override { return members_.rank; }
  int size() const override { return members_.size; }
  const std::string& name() const override { return members_.group; }
  std::string_view backend(Device) const override { return "nccl"; }
  /// Not for bitwise operators, but on bools.
  bool supports(const Collective& c) const override;
  bool captures(const Collective& c) const override { return !traits(c.kind).p2p; }
  /// Throws UserError for tensors on another card than that of the group's first call.
  Ref<Work> submit(const Collective& c) override;
  Ref<CardGroup> split_beside(const ProcessGroup* part, int color, int key) override;
  void abort(const std::string& why) override;
  void flush() override;
  void submit_messages() override;
  Ref<Storage> allocate(size_t bytes, OnAll on_all) override;
  bool has_own_memory(Device device) const override;
  int global_rank(int r) const override { return members_.world_ranks[size_t(r)]; }
  Millis timeout() const override { return context_.timeout; }
  void working(std::string_view) override {}  // the CPU's group tells

 private:
  const detail::Membership members_;
  const GroupContext context_;
  const Ref<GroupCore> core_;
};

/// The members of the group of cards beside `cpu`.
detail::Membership members_beside(const ProcessGroup& cpu);

}  // namespace tessera::nccl
