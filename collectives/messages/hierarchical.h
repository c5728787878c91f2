// Collectives of ranks on several hosts that use shared memory within each host. The group is
// divided into blocks of B ranks on one host: ranks [kB, (k + 1) B) for every k. The ranks of a
// block do as much as possible among themselves in shared memory. Then rank l of each block
// exchanges messages with rank l of every other block, a B-th of the bytes each, so that B times
// fewer bytes cross between hosts than if every rank sent to every other. (The scheme is that of
// Goyal et al. 2017, section 4.1, with a slice for each rank of a host instead of one leader.) B is
// a power of two, so a block is a branch of the balanced tree of reductions, and results have the
// same bits as on any other backend. Invariant: nothing moves in a block before all ranks of the
// group have agreed on the call.
#pragma once
#include "collectives/messages/engine.h"

namespace tessera::detail {

/// Returns the largest power of two B that divides the number of ranks and for which each set of
/// ranks [kB, (k + 1) B) is on one host; `hosts` names the host of every rank. 1: there are no
/// blocks.
int block_of_hosts(std::span<const std::string> hosts);

/// The members of the block of B ranks that `m`'s rank belongs to.
Membership block_of(const Membership& m, int B);

/// Uses blocks for all_reduce, reduce_scatter, all_gather and broadcast of more than
/// kStraightBytes, except for sums, averages and products of 16-bit floats, which would be rounded
/// once more between the two levels. All other calls send straight from rank to rank.
class HierarchicalEngine final : public MessageEngine {
 public:
  static constexpr int64_t kStraightBytes = limit("messages.straight") * kLineBytes;

  /// `block` moves what stays in the block of B ranks.
  HierarchicalEngine(const Membership& members, std::unique_ptr<Transport> transport,
                     std::shared_ptr<Watchdog> dog, std::shared_ptr<Store> store,
                     std::string prefix, int B, std::unique_ptr<Engine> block);

  std::string_view name() const override;
  void interrupt() override;
  void call_queued() override;
  void abort(const CommError& error) override;
  Ref<Storage> allocate(size_t bytes) override { return block_->allocate(bytes); }
  bool has_own_memory() const override { return block_->has_own_memory(); }

 protected:
  void move(Call& call) override;

 private:
  bool goes_through_blocks(const Plan& plan) const;
  void all_reduce_by_blocks(Call& call);
  void reduce_scatter_by_blocks(Call& call);
  void all_gather_by_blocks(Call& call);
  void broadcast_by_blocks(Call& call);
  Plan part_plan(const Call& call, CollKind kind) const;
  void in_block(const Call& call, const Plan& plan);
  void gather_in_block(const Call& call, Parts pieces);
  int peer_in(int block) const { return block * B_ + l_; }

  const int B_, blocks_;  // ranks of a block, and how many there are
  const int k_, l_;       // this rank's block, and its number in it
  const std::unique_ptr<Engine> block_;
  std::vector<int> peers_;  // rank l of every block
};

}  // namespace tessera::detail
