// Gathers whole weights before a group's forward and its backward, and releases them after.
#include <algorithm>

#include "collectives/together.h"
#include "core/autograd/autograd.h"
#include "core/autograd/recompute.h"
#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/nn/scope.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"
#include "parallel/fsdp_state.h"

namespace tessera::parallel::fsdp {
namespace {

using nn::Module;

// Gathers a weight again for backward.
class GatherAgain final : public Recipe {
 public:
  GatherAgain(std::weak_ptr<State> state, size_t group, size_t param, State::Used used)
      : state_(std::move(state)), group_(group), param_(param), used_(std::move(used)) {}
  Ref<Storage> rebuild() override {
    std::shared_ptr<State> state = state_.lock();
    TESSERA_CHECK(state, "fully_shard: backward through a model that is gone");
    return state->rebuild(group_, param_, used_);
  }

 private:
  std::weak_ptr<State> state_;
  size_t group_, param_;
  State::Used used_;
};

// An identity on the inputs of a group that marks the end of the group's backward: its node was
// made before the group's ops, so backward visits it after them.
class Exit final : public GradNode {
 public:
  Exit(std::weak_ptr<State> state, size_t group) : state_(std::move(state)), group_(group) {}
  std::string_view name() const override { return "fully_shard"; }
  void release_saved() override {}
  bool released() const override { return false; }  // it holds no tensors
  Tensors vjp(std::span<const Tensor> cot, uint32_t, bool) override {
    if (std::shared_ptr<State> state = state_.lock()) state->left(group_);
    return Tensors(cot.begin(), cot.end());
  }

 private:
  std::weak_ptr<State> state_;
  size_t group_;
};

bool is_at(const Tensor& t, const Storage* values, uint32_t version) {
  const Ref<Storage>& now = local_of(t).storage();
  return now.get() == values && now->version() == version;
}

}  // namespace

// This rank's piece on the device of the whole weight, and in its dtype.
Tensor State::to_gather(const Param& p) const {
  const DType dtype = options_.precision.param.value_or(p.sharded.dtype());
  if (!options_.offload) return cast(p.sharded.detach(), dtype);
  StreamScope beside(copies(p, kUp));
  const Tensor piece = cast(local_of(p.sharded).detach().to(p.device), dtype);
  return from_local(piece, p.mesh, layout_of(p.sharded), p.sharded.shape());
}

// Starts the gather of one parameter, whose values may be pending. Its ops belong to the parameter,
// not to the module whose forward or backward prefetches.
void State::gather(size_t group, size_t param, const Room* room) {
  Group& g = groups_[group];
  Param& p = g.params[param];
  nn::Scope scope = nn::Scope::module(p.name);
  Scoped<uint64_t> of_no_node(context().grad_node, 0);
  p.values = local_of(p.sharded).storage();
  p.version = p.values->version();
  const bool eight = p.eight && !pinned_;
  const Tensor piece = eight ? quantised(p) : to_gather(p);
  const bool has_part = room && p.even && eight == p.eight.has_value();
  Tensor whole = has_part ? gathered_in(*room, p, param, local_of(piece).detach())
                          : to_local(redistribute(piece, p.whole));
  p.full_version = whole.storage()->version();
  if (grad_enabled() || context().phase == Phase::kBackward) time_.add(whole);
  const bool is_whole = process_group().size() == 1 && !options_.offload;
  bool keep = g.is_root || !options_.reshard_after_forward || is_whole;
  if (!keep && grad_enabled())
    whole.storage()->set_recipe(
        Ref<Recipe>(new GatherAgain(weak_from_this(), group, param,
                                    {p.values, p.version, eight, eight ? p.eight->history : 0})));
  g.gathered_bytes += int64_t(whole.nbytes());
  p.full = p.rest.defined() ? from_local(whole, p.rest, p.rest_layout, p.sharded.shape())
                            : whole.detach();
  if (eight) p.eight->values = std::exchange(p.full, stand_in(p));
  if (p.trainable()) {  // all forwards share one history, so that each gradient comes once
    p.full.impl()->autograd = p.leaf.impl()->autograd;
    p.full.impl()->layers |= bit(Layer::kAutograd);
  }
}

// The same in a room. A piece that is not in the group's own memory is copied there first.
Tensor State::gathered_in(const Room& room, const Param& p, size_t param, Tensor piece) {
  if (piece.storage() != p.home) {
    const Tensor there(Meta::contiguous(piece.shape(), piece.dtype(), p.device),
                       room.part(2 * param));
    copy_values(there, piece);
    piece = there;
  }
  Tensor whole(Meta::contiguous(local_of(p.leaf).shape(), piece.dtype(), p.device),
               room.part(2 * param + 1));
  process_group().all_gather_async(whole, piece);
  return whole;
}

Room* State::room_to_gather(size_t group) {
  if (!make_rooms(gathered_, true)) return nullptr;
  size_t at = group, end = group + 1;  // those that it may have
  if (options_.reshard_after_forward && !groups_[group].is_root) at = 1, end = gathered_.size();
  const auto busy = [&](const Room& r) {
    return r.user() != Room::kNobody && groups_[r.user()].gathered;
  };
  Room* free = nullptr;  // the one that it had last, or else the first
  for (; at < end; ++at)
    if (Room& r = gathered_[at]; !busy(r) && (!free || r.user() == group)) free = &r;
  if (free) free->take(group, parts_of(groups_[group], true));
  return free;  // null: more groups are gathered than there are rooms, as by unshard()
}

bool State::stale(const Group& g) const {
  return std::ranges::any_of(
      g.params, [](const Param& p) { return !is_at(p.sharded, p.values.get(), p.version); });
}

void State::gather(Group& g) {
  bool unfit = grad_enabled() && !g.recorded;  // a forward that was not recorded gathered it
  unfit |= pinned_ && in_eight_bits(g);
  if (g.gathered && (unfit || stale(g))) keep_written(g), let_go(g);
  if (g.gathered) return;
  Scoped<bool> may_be_recorded_later(context().inference, false);
  if (!pinned_) update_scales();
  g.recorded = grad_enabled();
  g.gathered_bytes = 0;
  size_t group = size_t(&g - groups_.data());
  const Room* room = room_to_gather(group);
  const TogetherScope together;
  for (size_t i = 0; i < g.params.size(); ++i) gather(group, i, room);
  g.gathered = true;
  memory_.gathered += g.gathered_bytes;
  memory_.gathered_peak = std::max(memory_.gathered_peak, memory_.gathered);
  if (pinned_) put_into_slots(g, &Param::full);
}

void State::let_go(Group& g) {
  if (!g.gathered) return;
  for (Param& p : g.params) {
    p.full = {}, p.values = {};
    if (p.eight) p.eight->values = {};
  }
  g.gathered = false;
  memory_.gathered -= std::exchange(g.gathered_bytes, 0);
}

void State::release(Group& g) {
  if (pinned_ || !g.gathered) return;
  keep_written(g);
  let_go(g);
}

void State::put_into_slots(Group& g, Tensor Param::*which) {
  for (Param& p : g.params) {
    for (Tensor* slot : p.slots) *slot = p.*which;
    if (!p.eight) continue;
    const EightBits& e = *p.eight;
    const bool gathered = which == &Param::full && e.values.defined();
    gathered ? e.weight->stand_in(p.full, e.values, e.scale, e.amax)
             : e.weight->stand_in({}, {}, {}, {});
  }
}

// Gathers the group before or after `group` in the order of the last forward.
void State::prefetch(size_t group, int direction) {
  if (!options_.prefetch) return;
  auto it = std::ranges::find(last_order_, group);
  if (it == last_order_.end()) return;
  int64_t next = it - last_order_.begin() + direction;
  if (next < 0 || next >= int64_t(last_order_.size())) return;
  Group& neighbour = groups_[last_order_[size_t(next)]];
  if (direction > 0 || neighbour.backward_comes) gather(neighbour);
}

Ref<Storage> State::rebuild(size_t group, size_t param, const Used& used) {
  const Param& p = groups_[group].params[param];
  TESSERA_CHECK(is_at(p.sharded, used.values.get(), used.version),
                "fully_shard: {} was overwritten after it was saved for backward; run backward "
                "before the update",
                p.name);
  TESSERA_CHECK(!used.in_eight_bits || p.eight->weight->version() == used.history,
                "fully_shard: the scale of {} moved on after it was saved for backward; call "
                "update_fp8_scales() after backward",
                p.name);
  gather(groups_[group]);
  prefetch(group, -1);
  // Between forward and backward unshard() or reshard() may have changed how it is gathered.
  if (used.in_eight_bits == p.gathered_in_eight_bits())
    return local_of(used.in_eight_bits ? p.eight->values : p.full).storage();
  if (used.in_eight_bits) return to_local(redistribute(quantised(p), p.whole)).storage();
  return to_local(redistribute(to_gather(p), p.whole)).storage();
}

// ---- writes into whole weights: load_state after unshard(), init, a rule that scales weights.
// Every rank must write the same; each keeps its piece.

bool State::was_written(const Param& p) const {
  if (!p.full.defined() || p.gathered_in_eight_bits()) return false;
  const Ref<Storage>& whole = local_of(p.full).storage();
  return whole != p.values && whole->version() != p.full_version;
}

void State::check_writable(const Param& p) const {
  TESSERA_CHECK(p.full.dtype() == p.sharded.dtype(),
                "fully_shard: {} was written while it was gathered as {}, the parameter is {}, so "
                "digits would be lost; write it while it is sharded, after reshard()",
                p.name, name_of(p.full.dtype()), name_of(p.sharded.dtype()));
  TESSERA_CHECK(is_at(p.sharded, p.values.get(), p.version),
                "fully_shard: {} was written both whole and sharded (by an optimizer?) since it "
                "was gathered; reshard() in between",
                p.name);
}

void State::keep_written(Group& g) {
  NoGrad off;
  for (const Param& p : g.params)
    if (was_written(p)) check_writable(p);
  for (Param& p : g.params) {
    if (!was_written(p)) continue;
    Tensor whole = local_of(p.full).detach();
    assign_(local_of(p.sharded), to_local(distribute(whole, options_.mesh, p.cut)));
    p.version = p.values->version();
    p.full_version = whole.storage()->version();
  }
}

// ---- forward

void State::before_forward(size_t group, Inputs in) {
  recomputation::Apart apart;  // gathering is not computed again with the rest
  Group& g = groups_[group];
  if (g.is_root && options_.precision.param)
    for (Tensor& t : in)
      if (t.defined() && is_differentiable(t.dtype())) t = cast(t, *options_.precision.param);
  if (recomputation::running_again()) {  // in backward, where the weights are or will soon be
    gather(g);
    put_into_slots(g, &Param::full);
    return prefetch(group, -1);
  }
  check_unchanged(g);
  if (g.is_root) {
    order_.clear();
    time_.count();  // of forwards without a backward
    scales_are_due_ |= context().records;
    for (Group& other : groups_)  // groups that an interrupted backward has left gathered
      if (!other.is_root && options_.reshard_after_forward) release(other);
  }
  gather(g);
  put_into_slots(g, &Param::full);
  if (std::ranges::find(order_, group) == order_.end()) order_.push_back(group);
  prefetch(group, +1);
  add_exit(group, in);
}

// Adds an Exit. If all parameters have gradients it is not needed: the last of these tells that
// backward has left the group.
void State::add_exit(size_t group, Inputs in) {
  Group& g = groups_[group];
  g.has_exit = false;
  if (!grad_enabled() || g.trainable == g.params.size()) return;
  Ref<GradNode> node;
  for (Tensor& t : in) {
    Ref<GradMeta> history(t.defined() ? grad_meta(t) : nullptr);
    if (!history) continue;
    if (!node) node = Ref<GradNode>(new Exit(weak_from_this(), group));
    t = t.detach();
    attach_grad_meta(t, node, int(node->inputs.size()));
    node->add_input(history.get());
  }
  g.has_exit = bool(node);
}

// Sums, hooks and the gradient sink were set up for the parameters that were trainable then.
void State::check_unchanged(const Group& g) const {
  for (const Param& p : g.params) {
    const GradMeta* meta = grad_meta(p.sharded);
    TESSERA_CHECK((meta && meta->sink == this) == p.trainable() && bool(meta) == p.trainable(),
                  "fully_shard: {} was {} after fully_shard; do that before", p.name,
                  meta ? "unfrozen" : "frozen");
  }
}

void State::forward_failed(size_t group) {
  if (pinned_) return;
  put_into_slots(groups_[group], &Param::sharded);
  let_go(groups_[group]);
  if (groups_[group].is_root) forget_recorded_scales();
}

void State::after_forward(size_t group, Tensor& out) {
  recomputation::Apart apart;
  Group& g = groups_[group];
  if (g.is_root && options_.precision.output) out = cast(out, *options_.precision.output);
  if (recomputation::running_again()) {  // backward needs the weights next
    if (!pinned_) put_into_slots(g, &Param::sharded);
    return;
  }
  g.backward_comes = grad_enabled() && out.requires_grad();
  if (pinned_) return;
  put_into_slots(g, &Param::sharded);
  if (!g.backward_comes || (!g.is_root && options_.reshard_after_forward)) release(g);
  if (!g.is_root) return;
  last_order_ = order_;
  for (Group& other : groups_)  // groups prefetched in vain because the order changed
    if (!other.is_root && (options_.reshard_after_forward || !grad_enabled())) release(other);
  if (!g.backward_comes) forget_recorded_scales();
}

void State::check_model(const char* what) const {
  TESSERA_CHECK(root_.attached(), "fully_shard: {} of a model that is gone", what);
}

void State::unshard() {
  check_model("unshard()");
  NoGrad off;
  pinned_ = true;
  for (Group& g : groups_) {
    gather(g);
    put_into_slots(g, &Param::full);
  }
}

void State::reshard() {
  check_model("reshard()");
  for (Group& g : groups_) keep_written(g);  // may throw, so it comes before any change
  pinned_ = false;
  for (Group& g : groups_) {
    put_into_slots(g, &Param::sharded);
    release(g);
  }
}

}  // namespace tessera::parallel::fsdp
