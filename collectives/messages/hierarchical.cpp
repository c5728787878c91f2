#include "collectives/messages/hierarchical.h"

#include <algorithm>
#include <cstring>

#include "collectives/backend_name.h"
#include "collectives/reduction.h"
#include "core/base/boundary.h"

namespace tessera::detail {
namespace {

Parts slices(const Part& whole, int n) {
  Parts parts;
  for (int i = 0; i < n; ++i) {
    const Slice s = slice_of(whole.bytes, i, n);
    parts.push_back({whole.data + s.begin, s.end - s.begin});
  }
  return parts;
}

int64_t longest(const Parts& parts) {
  int64_t bytes = 0;
  for (const Part& p : parts) bytes = std::max(bytes, p.bytes);
  return bytes;
}

Ref<Call> part_of(const Call& call, const Plan& plan) {
  auto part = make_ref<Call>();
  part->begin_part(call, plan, call.timeout);
  return part;
}

}  // namespace

int block_of_hosts(std::span<const std::string> hosts) {
  const size_t n = hosts.size();
  auto fits = [&](size_t B) {
    for (size_t r = 0; r < n; ++r)
      if (hosts[r] != hosts[r / B * B]) return false;
    return n % B == 0;
  };
  size_t B = 1;
  while (2 * B <= n && fits(2 * B)) B *= 2;
  return int(B);
}

Membership block_of(const Membership& m, int B) {
  Membership block{.group = m.group, .rank = m.rank % B, .size = B, .world_ranks = {}};
  block.first = m.rank / B * B;
  for (int r = block.first; r < block.first + B; ++r)
    block.world_ranks.push_back(m.world_ranks[size_t(r)]);
  return block;
}

HierarchicalEngine::HierarchicalEngine(const Membership& m, std::unique_ptr<Transport> transport,
                                       std::shared_ptr<Watchdog> dog, std::shared_ptr<Store> store,
                                       std::string prefix, int B, std::unique_ptr<Engine> block)
    : MessageEngine(m, std::move(transport), std::move(dog), std::move(store), std::move(prefix)),
      B_(B),
      blocks_(m.size / B),
      k_(m.rank / B),
      l_(m.rank % B),
      block_(std::move(block)) {
  for (int k = 0; k < blocks_; ++k) peers_.push_back(peer_in(k));
}

std::string_view HierarchicalEngine::name() const { return kBlocks; }

void HierarchicalEngine::interrupt() {
  MessageEngine::interrupt();
  block_->interrupt();
}

void HierarchicalEngine::call_queued() { block_->call_queued(); }

void HierarchicalEngine::abort(const CommError& error) {
  MessageEngine::abort(error);
  block_->abort(error);
}

bool HierarchicalEngine::goes_through_blocks(const Plan& plan) const {
  const bool rounds =
      size_of(plan.dtype) == 2 && plan.op != ReduceOp::kMin && plan.op != ReduceOp::kMax;
  if (plan.has_splits() || (plan.reduces && rounds)) return false;
  int64_t bytes = 0;  // of the whole tensor
  switch (plan.kind) {
    case CollKind::kAllReduce:
    case CollKind::kBroadcast: bytes = plan.longest; break;
    case CollKind::kReduceScatter:
    case CollKind::kAllGather: bytes = plan.longest * size_; break;
    default: return false;
  }
  meet("messages.straight", lines_of(bytes));
  return bytes > kStraightBytes;
}

void HierarchicalEngine::move(Call& call) {
  if (!goes_through_blocks(call.plan)) return MessageEngine::move(call);
  switch (call.plan.kind) {
    case CollKind::kAllReduce: return all_reduce_by_blocks(call);
    case CollKind::kReduceScatter: return reduce_scatter_by_blocks(call);
    case CollKind::kAllGather: return all_gather_by_blocks(call);
    default: return broadcast_by_blocks(call);
  }
}

/// The plan of a collective of this `kind` within the block, without pieces yet.
Plan HierarchicalEngine::part_plan(const Call& call, CollKind kind) const {
  Plan plan;
  plan.kind = kind;
  plan.op = call.plan.op == ReduceOp::kAvg ? ReduceOp::kSum : call.plan.op;  // divided at the end
  plan.dtype = call.plan.dtype;
  plan.rank = l_, plan.size = B_;
  plan.takes = true;
  plan.reduces = plan.one_for_each = kind == CollKind::kReduceScatter;
  return plan;
}

void HierarchicalEngine::in_block(const Call& call, const Plan& plan) {
  Ref<Call> part = part_of(call, plan);
  const Watch::Op op(
      watch_, *part, [this](const CommError& e) { block_->abort(e); }, {}, {}, true);
  block_->run(*part);
}

/// Gives every rank of the block all `pieces`, of which this rank has its own.
void HierarchicalEngine::gather_in_block(const Call& call, Parts pieces) {
  Plan plan = part_plan(call, CollKind::kAllGather);
  plan.longest = longest(pieces);
  plan.give = {pieces[size_t(l_)]};
  plan.take = std::move(pieces);
  in_block(call, plan);
}

/// Rank l of a block reduces slice l over the block, then over the blocks.
void HierarchicalEngine::all_reduce_by_blocks(Call& call) {
  const Plan& whole = call.plan;
  std::vector<std::byte> copy;  // the result would overwrite what is still to be read
  const Part in = whole.must_stage() ? copied(whole.give, copy)[0] : whole.give[0];
  const Parts out = slices(whole.take[0], B_);
  const Part& mine = out[size_t(l_)];
  Plan plan = part_plan(call, CollKind::kReduceScatter);
  plan.give = slices(in, B_);
  plan.take = {mine};
  plan.longest = longest(out);
  in_block(call, plan);
  all_reduce(*part_of(call, whole), mine, mine, peers_, k_);
  gather_in_block(call, out);
}

/// For each block in turn, rank l reduces over this block what that block's rank l is to get; then
/// the results from all blocks are reduced at their destination.
void HierarchicalEngine::reduce_scatter_by_blocks(Call& call) {
  const Plan& whole = call.plan;
  std::vector<int64_t> at(size_t(blocks_) + 1);
  for (int k = 0; k < blocks_; ++k)
    at[size_t(k) + 1] = at[size_t(k)] + whole.give[size_t(peer_in(k))].bytes;
  const Scratch partial(at.back());
  for (int k = 0; k < blocks_; ++k) {
    Plan plan = part_plan(call, CollKind::kReduceScatter);
    plan.give = Parts(whole.give.begin() + k * B_, whole.give.begin() + (k + 1) * B_);
    plan.take = {{partial.data() + at[size_t(k)], at[size_t(k) + 1] - at[size_t(k)]}};
    plan.longest = longest(plan.give);
    in_block(call, plan);
  }
  const Part& out = whole.take[0];
  const Scratch terms(out.bytes * blocks_);
  std::vector<const void*> sources(static_cast<size_t>(blocks_));
  std::vector<Transfer> transfers;
  for (int k = 0; k < blocks_; ++k) {
    std::byte* mine = partial.data() + at[size_t(k)];
    std::byte* term = terms.data() + k * out.bytes;
    sources[size_t(k)] = k == k_ ? mine : term;
    if (k == k_) continue;
    transfers.push_back({peer_in(k), mine, at[size_t(k) + 1] - at[size_t(k)], true});
    transfers.push_back({peer_in(k), term, out.bytes, false});
  }
  exchange(*part_of(call, whole), transfers, Step::kPieces);
  reduce_tree(whole.op, whole.dtype, out.data, sources, out.bytes / int64_t(size_of(whole.dtype)),
              size_);
}

/// Rank l of a block exchanges pieces with rank l of every other block, and passes what it gets to
/// its own block.
void HierarchicalEngine::all_gather_by_blocks(Call& call) {
  const Plan& whole = call.plan;
  std::vector<std::byte> copy;  // results would overwrite what is still to be sent
  const Part give = whole.must_stage() ? copied(whole.give, copy)[0] : whole.give[0];
  std::vector<Transfer> transfers;
  for (int k = 0; k < blocks_; ++k) {
    if (k == k_) continue;
    const Part& piece = whole.take[size_t(peer_in(k))];
    transfers.push_back({peer_in(k), give.data, give.bytes, true});
    transfers.push_back({peer_in(k), piece.data, piece.bytes, false});
  }
  exchange(*part_of(call, whole), transfers, Step::kPieces);
  const Part& own = whole.take[size_t(rank_)];
  if (own.data != give.data && own.bytes) std::memmove(own.data, give.data, size_t(own.bytes));
  for (int k = 0; k < blocks_; ++k)
    gather_in_block(call, Parts(whole.take.begin() + k * B_, whole.take.begin() + (k + 1) * B_));
}

/// The root's block passes the tensor on in slices: rank l sends slice l to rank l of every other
/// block.
void HierarchicalEngine::broadcast_by_blocks(Call& call) {
  const Plan& whole = call.plan;
  const int root = whole.giver, home = root / B_;
  const Part& all = whole.takes ? whole.take[0] : whole.give[0];
  if (k_ == home) {
    Plan plan = part_plan(call, CollKind::kBroadcast);
    plan.giver = root % B_;
    plan.takes = whole.takes;
    plan.longest = all.bytes;
    (whole.takes ? plan.take : plan.give) = {all};
    in_block(call, plan);
  }
  const Parts parts = slices(all, B_);
  const Part& mine = parts[size_t(l_)];
  std::vector<Transfer> transfers;
  for (int k = 0; k < blocks_; ++k)
    if (k != k_ && (k == home || k_ == home))
      transfers.push_back({peer_in(k), mine.data, mine.bytes, k_ == home});
  exchange(*part_of(call, whole), transfers, Step::kPieces);
  if (k_ != home) gather_in_block(call, parts);
}

}  // namespace tessera::detail
