// Memory of the process group's own on a device, for what fully_shard moves there: this rank's
// pieces of the parameters, and rooms in which groups of parameters are gathered and their
// gradients reduced, in turn. Ranks move a value in the same place of it or all outside, so which
// group has which room depends on the order of gathers and reductions alone, which is that of all
// ranks. Invariant: nobody sees a room that another group has: what the program still holds of it
// is moved to memory of its own first.
#pragma once
#include <span>
#include <vector>

#include "collectives/process_group.h"
#include "core/tensor/tensor.h"

namespace tessera::parallel::fsdp {

/// Cuts a block into parts, each a storage of its own.
class Parts {
 public:
  explicit Parts(Ref<Storage> block) : block_(std::move(block)) {}
  Ref<Storage> next(size_t bytes);
  /// What a part of `bytes` takes of a block.
  static size_t size_of_part(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

 private:
  static constexpr size_t kAlign = 256;
  const Ref<Storage> block_;
  size_t at_ = 0;
};

/// A block that groups of parameters use in turn.
class Room {
 public:
  Room() = default;
  explicit Room(Ref<Storage> block) : block_(std::move(block)) {}
  bool fits(size_t bytes) const { return block_ && bytes <= block_->bytes(); }
  int64_t bytes() const { return int64_t(block_->bytes()); }
  /// Gives it to group `user`, in parts of these sizes. Kernels of the calling thread that use them
  /// come after all that the last user's parts were used for.
  void take(size_t user, std::span<const size_t> sizes);
  size_t user() const { return user_; }
  const Ref<Storage>& part(size_t i) const { return parts_[i]; }
  bool has(const Storage* part) const;

  static constexpr size_t kNobody = size_t(-1);

 private:
  Ref<Storage> block_;
  size_t user_ = kNobody;
  std::vector<Ref<Storage>> parts_;
};

}  // namespace tessera::parallel::fsdp
