// Weights that layers multiply in eight bits (core/nn/fp8.h) are gathered so: each rank quantises
// its piece by the scale of the whole weight, and the layer is given what was gathered. Invariant:
// in the slot is a tensor without values then, which only that layer can use.
#include <algorithm>
#include <cmath>

#include "collectives/ops.h"
#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/nn/layers.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "parallel/fsdp_state.h"

namespace tessera::parallel::fsdp {

// Tied weights stay as they are: what else reads them needs their values.
void State::find_eight_bits(Param& p, std::span<const nn::Slot> slots) const {
  const auto* linear = dynamic_cast<const nn::Linear*>(slots[0].owner);
  if (slots.size() > 1 || !linear || slots[0].tensor != &linear->weight) return;
  std::shared_ptr<nn::Fp8Weight> weight = nn::fp8_weight_to_gather(*linear);
  if (!weight) return;
  TESSERA_CHECK(!options_.offload,
                "fully_shard: offload of {}, which is to be gathered in eight bits: the host would "
                "have to find its scale; leave out offload or Fp8Options::gather_in_eight_bits",
                p.name);
  p.eight.emplace().weight = std::move(weight);
}

bool State::scales_are_known(const Param& p) const {
  const EightBits& e = *p.eight;
  const Ref<Storage>& now = local_of(p.sharded).storage();
  return e.scale.defined() && e.piece == now && e.version == now->version() &&
         e.history == e.weight->version();
}

// The largest magnitudes of all weights by one all-reduce, once after each change of weights, and
// once in each forward that is recorded, whose replays follow such changes.
void State::update_scales() {
  std::vector<Param*> all;
  for (Group& g : groups_)
    for (Param& p : g.params)
      if (p.eight) all.push_back(&p);
  const bool records = context().records;
  if (all.empty() || (!scales_are_due_ && scales_recorded_ == records &&
                      std::ranges::all_of(all, [&](Param* p) { return scales_are_known(*p); })))
    return;
  NoGrad off;
  Scoped<uint64_t> of_no_node(context().grad_node, 0);
  std::vector<Tensor> own;
  std::vector<ProcessGroup*> over{&process_group()};  // each rank of which has a piece
  for (const Param* p : all) {
    const Tensor piece = local_of(p->sharded).detach();
    own.push_back(piece.numel() ? cast(amax(abs(piece)), kF32) : full({}, 0.0, {kF32, p->device}));
    for (int axis = 0; axis < int(p->rest_layout.size()); ++axis)
      if (ProcessGroup* cut = p->rest.group(axis).get();
          p->rest_layout[size_t(axis)].is_shard() && std::ranges::find(over, cut) == over.end())
        over.push_back(cut);
  }
  Tensor most = stack(own, 0);
  // Whether the largest of numbers and a NaN is NaN depends on who compares.
  most = where(isnan(most), scalar_tensor(INFINITY, {kF32, most.device()}), most);
  for (ProcessGroup* group : over)
    if (group->size() > 1) most = all_reduce(most, Ref<ProcessGroup>(group), ReduceOp::kMax);
  for (size_t i = 0; i < all.size(); ++i) {
    EightBits& e = *all[i]->eight;
    e.piece = local_of(all[i]->sharded).storage();
    e.version = e.piece->version(), e.history = e.weight->version();
    e.amax = select(most, 0, int64_t(i));
    e.scale = e.weight->scale_of(e.amax);
  }
  scales_are_due_ = false, scales_recorded_ = records;
}

// Values of a recorded step may not outlive it.
void State::forget_recorded_scales() {
  if (!scales_recorded_) return;
  for (Group& g : groups_)
    for (Param& p : g.params)
      if (p.eight) p.eight->amax = p.eight->scale = {};
}

Tensor State::quantised(const Param& p) const {
  const Tensor piece = p.eight->weight->quantised(local_of(p.sharded).detach(), p.eight->scale);
  return from_local(piece, p.mesh, layout_of(p.sharded), p.sharded.shape());
}

Tensor State::stand_in(const Param& p) const {
  return unreadable(p.leaf, fmt::format("fully_shard: {} was gathered in eight bits, which its "
                                        "layer alone reads; call unshard() before code that needs "
                                        "its values, or leave out Fp8Options::gather_in_eight_bits",
                                        p.name));
}

bool State::in_eight_bits(const Group& g) {
  return std::ranges::any_of(g.params, [](const Param& p) { return p.gathered_in_eight_bits(); });
}

}  // namespace tessera::parallel::fsdp
