// Reduces gradients: backward delivers whole gradients, and each rank's piece of their sum over
// ranks becomes the gradient of the sharded parameter.
#include <algorithm>
#include <utility>

#include "collectives/together.h"
#include "core/autograd/autograd.h"
#include "core/dispatch/copy.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"
#include "parallel/fsdp_state.h"

namespace tessera::parallel::fsdp {

void State::set_sync(bool sync) {
  TESSERA_CHECK(sync || !options_.tree_accumulation,
                "fully_shard: tree accumulation sums micro-batches after they are reduced; leave "
                "sync on");
  sync_.write(sync);
}

void State::deliver(int slot, Tensor grad) {
  NoGrad off;
  Param& p = param(slot);
  if (size_t(slot) >= places_.size()) return accumulate_directly(p, std::move(grad));
  Group& g = groups_[places_[size_t(slot)].first];
  TESSERA_CHECK(!std::exchange(p.delivered, true),
                "fully_shard: {} got two gradients in one backward, one of them of a backward that "
                "ran inside of the other; use recompute() for such a part of the model",
                p.name);
  delivered_ = true;
  if (p.rest.defined()) grad = to_local(redistribute(grad, p.rest_layout));
  if (options_.precision.reduce) grad = cast(grad, *options_.precision.reduce);
  if (p.gradient.defined()) {
    p.gradient = add(std::move(p.gradient), std::move(grad));
  } else {
    // Gradients that are being reduced are finished first, to make room for new ones.
    while (!on_their_way_.empty() && memory_.gradients + bytes_of(grad) > most_gradient_bytes_)
      finish_oldest_reduction();
    memory_.gradients += bytes_of(grad);
    memory_.gradients_peak = std::max(memory_.gradients_peak, memory_.gradients);
    p.gradient = std::move(grad);
  }
  if (++g.arrived == g.trainable) complete(g);
}

// All gradients of the group are there, so its weights are not read any more, unless some
// parameters are frozen and backward still has to pass through their ops.
void State::complete(Group& g) {
  if (!g.has_exit) release(g);
  if (!sync()) return;
  const Room* room = room_to_reduce(size_t(&g - groups_.data()));
  const TogetherScope together;
  for (size_t i = 0; i < g.params.size(); ++i) {
    Param& p = g.params[i];
    if (!p.trainable()) continue;
    const DType dtype = options_.precision.reduce.value_or(p.leaf.dtype());  // of the room's part
    p.reduced = room && p.even && p.gradient.dtype() == dtype ? reduced_in(*room, p, i)
                                                              : reduced(p, p.gradient);
    time_.add(local_of(p.reduced));
    if (options_.offload) p.reduced = downloaded(p, p.reduced);
    on_their_way_.push_back(&p);
  }
}

// Returns this rank's piece, perhaps pending, of the mean over ranks of `grad`, a rank's whole
// gradient.
Tensor State::reduced(const Param& p, Tensor grad) const {
  return redistribute(from_local(grad, p.mesh, p.term, p.sharded.shape()), layout_of(p.sharded));
}

// The same in a room, for the gradient of `p`, which is not needed any more then.
Tensor State::reduced_in(const Room& room, Param& p, size_t param) {
  const DType dtype = p.gradient.dtype();
  const Tensor whole(Meta::contiguous(p.gradient.shape(), dtype, p.device),
                     room.part(2 * param + 1));
  const Tensor piece(Meta::contiguous(local_of(p.sharded).shape(), dtype, p.device),
                     room.part(2 * param));
  copy_values(whole, p.gradient);
  drop_gradient(p);
  process_group().reduce_scatter_async(piece, whole, ReduceOp::kAvg);
  Layout summed = p.term;  // over the ranks that shard; those that replicate are left
  summed[size_t(options_.mesh.ndim()) - 1] = p.cut.back();
  return redistribute(from_local(piece, p.mesh, summed, p.sharded.shape()), layout_of(p.sharded));
}

// The room's last user has its sums first.
Room* State::room_to_reduce(size_t group) {
  if (!make_rooms(reduced_, false)) return nullptr;
  const bool own = groups_[group].is_root;
  Room& room = reduced_[own ? 0 : 1 + reductions_++ % (reduced_.size() - 1)];
  const auto reducing = [](const Param& p) { return p.reduced.defined(); };
  if (room.user() != Room::kNobody)
    while (std::ranges::any_of(groups_[room.user()].params, reducing)) finish_oldest_reduction();
  room.take(group, parts_of(groups_[group], false));
  return &room;
}

// The piece in memory of the host, pending: it is copied when it has been reduced.
Tensor State::downloaded(const Param& p, const Tensor& piece) const {
  StreamScope beside(copies(p, kDown));
  const Tensor local = cast(to_local(piece), p.sharded.dtype()).to(kCPU);
  return from_local(local, p.mesh, layout_of(p.sharded), p.sharded.shape());
}

void State::drop_gradient(Param& p) {
  if (p.gradient.defined()) memory_.gradients -= bytes_of(p.gradient);
  p.gradient = {};
}

// Finishes the oldest reduction and adds its result to the gradient of the parameter.
void State::finish_oldest_reduction() {
  Param& p = *on_their_way_.front();
  on_their_way_.pop_front();
  Tensor piece = std::exchange(p.reduced, {});
  // Until then the whole gradient is read. On a device whoever gets its memory waits there. A
  // recorder has deferred some reductions; those are not waited for, since its graph plans memory.
  Storage& local = *local_of(piece).storage();
  if (local.host_addressable() && dynamic_cast<Work*>(local.ready().get())) local.wait_ready();
  drop_gradient(p);
  piece = cast(piece, p.sharded.dtype());
  const Storage* at = local_of(piece).storage().get();
  if (std::ranges::any_of(reduced_, [&](const Room& r) { return r.has(at); })) piece = clone(piece);
  accumulate(p, after_hooks(*grad_meta(p.sharded), std::move(piece)));
}

// Adds `piece` to the parameter's gradient. With tree accumulation, level i holds the sum of 2^i
// micro-batches if bit i of their number is set, as in a binary counter.
void State::accumulate(Param& p, Tensor piece) {
  Tensor previous = p.sharded.grad();
  if (!options_.tree_accumulation) {
    p.sharded.set_grad(previous.defined() ? add(previous, piece) : std::move(piece));
    return;
  }
  size_t level = 0;
  for (; p.micro_batches >> level & 1; ++level)
    piece = add(std::exchange(p.levels[level], {}), piece);
  if (p.levels.size() <= level) p.levels.resize(level + 1);
  p.levels[level] = piece;
  ++p.micro_batches;
  // Partial sums that are in no complete tree yet are joined from the smallest up.
  Tensor total = piece;
  for (size_t up = level + 1; up < p.levels.size(); ++up)
    if (p.micro_batches >> up & 1) total = add(p.levels[up], total);
  p.sharded.set_grad(total);
}

// Adds the gradient of a loss term that reads the sharded parameter itself, such as a penalty.
void State::accumulate_directly(Param& p, Tensor piece) {
  TESSERA_CHECK(!options_.tree_accumulation,
                "fully_shard: {} is used outside of its model's forward, which tree accumulation "
                "has no place for; add the term inside of forward",
                p.name);
  if (!(layout_of(piece) == layout_of(p.sharded)))
    piece = redistribute(piece, layout_of(p.sharded));
  Tensor previous = p.sharded.grad();
  p.sharded.set_grad(previous.defined() ? add(previous, piece) : clone(piece));
}

// The program has cleared the gradient it sees, so everything kept for it is dropped.
void State::cleared(int slot) {
  Param& p = param(slot);
  if (!p.reduced.defined()) drop_gradient(p);
  p.levels.clear();
  p.micro_batches = 0;
  if (statistics_) statistics_->start_over();
}

void State::name_unused(const Group& g) {
  std::string names;
  for (const Param& p : g.params)
    if (p.trainable() && !p.gradient.defined()) names += (names.empty() ? "" : ", ") + p.name;
  throw UserError(fmt::format(
      "fully_shard: parameters got no gradient in this backward: {}; leave them out of the model "
      "or freeze them",
      names));
}

// Aborts every group that this rank is in: along the data-parallel axes and along those that stay.
void State::abort(const std::string& why) {
  const DeviceMesh& mesh = groups_.back().params.back().mesh;
  if (mesh.size() == 1) return;
  for (int axis = 0; axis < mesh.ndim(); ++axis) mesh.group(axis)->abort(why);
}

void State::backward_finished() {
  NoGrad off;
  for (Group& g : groups_) {
    if (sync() && delivered_ && g.arrived < g.trainable) {
      for (const Param& p : g.params)
        if (p.trainable() && !p.gradient.defined()) name_unused(g);
      complete(g);  // the rest came in earlier backwards, without sync
    }
    release(g);
    g.arrived = 0;
    for (Param& p : g.params) p.delivered = false;
  }
  while (!on_their_way_.empty()) finish_oldest_reduction();
  forget_recorded_scales();
  time_.count();
  delivered_ = false;
}

// The other ranks wait in a gather or a reduction that this one will not join.
void State::backward_abandoned(const std::string& why) {
  abort("fully_shard: a backward failed: " + why);
  on_their_way_.clear();
  for (Group& g : groups_) {
    for (Param& p : g.params) p.reduced = {}, p.delivered = false, drop_gradient(p);
    if (!pinned_) let_go(g);
    g.arrived = 0;
  }
  forget_recorded_scales();
  time_.forget();
  delivered_ = false;
}

// ---- grad()

GradMeta* State::known_as(int slot) { return grad_meta(param(slot).sharded); }

Tensor State::converted(int slot, Tensor grad) {
  const Param& p = param(slot);
  if (size_t(slot) >= places_.size()) return grad;
  if (p.rest.defined()) grad = to_local(redistribute(grad, p.rest_layout));
  if (options_.precision.reduce) grad = cast(grad, *options_.precision.reduce);
  const Tensor piece = reduced(p, grad);
  return options_.offload ? downloaded(p, piece) : cast(piece, p.sharded.dtype());
}

void State::grad_finished(const std::string& failure) {
  if (!failure.empty()) abort("fully_shard: a backward failed: " + failure);
  for (Group& g : groups_) release(g);
  forget_recorded_scales();
}

}  // namespace tessera::parallel::fsdp
