// The group that programs hold: one backend group for each kind of device. The tensors of a call
// decide which one runs it, so a program names no backend. Tensors of a device that has no backend
// are copied to the CPU, whose group then runs the call. Invariant: on every device, the members
// are the same ranks in the same order.
#pragma once
#include <array>
#include <functional>
#include <mutex>

#include "collectives/process_group.h"
#include "core/base/function_ref.h"

namespace tessera::detail {

/// A group of the cards of its ranks, one for each; calls without tensors go to the CPU's group
/// beside it.
class CardGroup : public ProcessGroup {
 public:
  /// Called by all its ranks after the CPU's group was split the same way, of which `part` is this
  /// rank's part (null for a negative color). Null where the part is no group of cards.
  virtual Ref<CardGroup> split_beside(const ProcessGroup* part, int color, int key) = 0;
  /// Submits messages that are put off: the host is about to wait for its peers in another way.
  virtual void submit_messages() = 0;
  /// Called where has_own_memory(), by all ranks with equal sizes, in the order of other calls.
  /// `on_all` returns whether its argument is true on all of them. Null where one rank has no
  /// memory, or this one cannot register it.
  using OnAll = FunctionRef<bool(bool here)>;
  virtual Ref<Storage> allocate(size_t bytes, OnAll on_all) = 0;
  Ref<Storage> allocate(size_t, Device) final {
    throw BugError("a group of cards allocates on all ranks together");
  }
  Ref<ProcessGroup> split(int, int, CallSite) final {
    throw BugError("a group of cards is split beside the CPU's");
  }
};

class DeviceGroup final : public ProcessGroup {
 public:
  /// Called with the ranks of the world that an aborted group failed on.
  using PublishCause = std::function<void(std::span<const int> world_ranks)>;
  /// A backend group for each DeviceKind, null where there is none.
  using ByKind = std::array<Ref<ProcessGroup>, kMaxDeviceKinds>;
  /// Makes the group of cards, or null: called by all ranks, with their cards, at the first
  /// collective on cards.
  using MakeCards = std::function<Ref<CardGroup>(ProcessGroup& cpu, Device device)>;
  /// That of the CPU, which is always there, also serves calls without tensors. `publish_cause` and
  /// `make_cards` may be null.
  DeviceGroup(ByKind groups, PublishCause publish_cause, MakeCards make_cards = nullptr)
      : groups_(std::move(groups)),
        publish_cause_(std::move(publish_cause)),
        make_cards_(std::move(make_cards)) {}
  ~DeviceGroup() override;

  int rank() const override { return cpu().rank(); }
  int size() const override { return cpu().size(); }
  const std::string& name() const override { return cpu().name(); }
  std::string_view backend(Device device) const override;
  bool supports(const Collective& c) const override;
  bool captures(const Collective& c) const override;
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
  /// Runs `c`, whose tensors are on a device, on copies of them. The calling thread waits for a
  /// synchronous call; for an asynchronous one whoever uses a result first does.
  Ref<Work> submit_staged(const Collective& c);
  /// The same for an asynchronous call, with the copies.
  Ref<Work> submit_staged_async(const Collective& c, Collective& copies);
  ProcessGroup& cpu() const { return *groups_[int(DeviceKind::kCPU)]; }
  /// The group that runs `c`, whose tensors are on `device`; null: it is staged.
  Ref<ProcessGroup> group_for(const Collective& c, Device device);
  Ref<CardGroup> cards() const;
  /// The group of cards, where it has memory of its own on `device`.
  Ref<CardGroup> owner_of_memory(Device device) const;
  const ByKind groups_;
  const PublishCause publish_cause_;
  const MakeCards make_cards_;
  mutable std::mutex mutex_;
  bool decided_ = false, told_ = false;
  bool registers_ = true;          // cards_ has memory of its own
  std::vector<Ref<Work>> staged_;  // asynchronous calls whose results were perhaps not copied back
  Ref<CardGroup> cards_;           // once that is decided; null: tensors on cards are staged
};

}  // namespace tessera::detail
