#include "core/autograd/level.h"

#include "core/autograd/batching.h"
#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

struct LevelTensor final : Wrapped {
  LevelTensor(Ref<Level> level, Tensor inner, bool batched)
      : Wrapped(std::move(inner), batched), level(std::move(level)) {}
  Ref<Wrapped> with(Tensor t) const override {
    return Ref<Wrapped>(new LevelTensor(level, std::move(t), batched));
  }
  bool in_use() const override { return level->in_use(); }
  const Ref<Level> level;
};

// The tensor that `t` wraps. If `t` has no other owner it is destroyed, so that its values have one
// owner and may be overwritten.
Tensor taken(Tensor& t, Wrapped& w) {
  if (t.ref()->use_count() > 1 || w.use_count() > 1) return w.inner;
  Tensor inner = std::move(w.inner);
  t = Tensor();
  return inner;
}

}  // namespace

Level* current_level() {
  Backend* b = context().backend;
  return b ? dynamic_cast<Level*>(b) : nullptr;
}

Tensor without_history(const Tensor& t) {
  Level* level = current_level();
  if (!level) return t.detach();
  bool batched;
  Tensor inner = level->inner(t, batched);
  Tensor apart = level->wrap(std::move(inner), batched);
  apart.impl()->detached = true;
  return apart;
}

Tensor Level::wrap(Tensor inner, bool batched) {
  return wrapper(Ref<Wrapped>(new LevelTensor(Ref<Level>(this), std::move(inner), batched)));
}

const Wrapped* Level::mine(const Tensor& t) const {
  const Wrapped* w = wrapped(t);
  return w && static_cast<const LevelTensor*>(w)->level.get() == this ? w : nullptr;
}

Tensor Level::inner(const Tensor& t, bool& batched) const {
  const auto* w = static_cast<const LevelTensor*>(wrapped(t));
  batched = false;
  if (!w) return t;
  if (w->level.get() == this) {
    batched = w->batched;
    return w->inner;
  }
  TESSERA_CHECK(w->level->entered_,
                "{} belongs to a function transform that is over; return the tensor from the "
                "function instead of keeping it",
                describe(t));
  return t;
}

Tensor Level::adopt(const Tensor& t) {
  if (mine(t)) return t;
  bool batched;
  Tensor outer = inner(t, batched);
  return wrap(std::move(outer), batched);
}

Level::Enter::Enter(Level& level)
    : level_(level),
      enabled_(context().enabled),
      forced_(context().forced),
      target_(context().target()),
      inference_(context().inference),
      outer_enabled_(level.outer_enabled_),
      outer_forced_(level.outer_forced_),
      outer_target_(level.outer_),
      outer_inference_(level.outer_inference_) {
  Context& c = context();
  ++level.entered_;
  level.outer_ = c.target(), level.outer_enabled_ = c.enabled, level.outer_forced_ = c.forced;
  level.outer_inference_ = c.inference;
  c.backend = &level;
  if (c.observer) c.observer = &level;
  c.inference = false;
  // Wrappers are never sharded; the tensors that they wrap may be.
  c.enabled &= LayerMask(~bit(Layer::kSharding));
  if (!level.vectorizes()) c.enabled |= bit(Layer::kAutograd);
  // Sample numbers are those of the whole batch, which the function does not see.
  if (level.vectorizes()) samples_ = std::exchange(c.samples, {});
}

Level::Enter::~Enter() {
  Context& c = context();
  c.enabled = enabled_, c.forced = forced_, c.target() = target_, c.inference = inference_;
  if (level_.vectorizes()) c.samples = std::move(samples_);
  level_.outer_enabled_ = outer_enabled_, level_.outer_forced_ = outer_forced_;
  level_.outer_ = outer_target_, level_.outer_inference_ = outer_inference_;
  --level_.entered_;
}

namespace {

// A NoGrad of the program turns recording off at every level.
LayerMask enabled_outside(LayerMask outside, bool unrecorded) {
  bool off = !(context().enabled & bit(Layer::kAutograd)) && !unrecorded;
  return off ? LayerMask(outside & ~bit(Layer::kAutograd)) : outside;
}

}  // namespace

Level::Outside::Outside(Level& level)
    : target_(level.outer_),
      enabled_(context().enabled, enabled_outside(level.outer_enabled_, level.unrecorded_)),
      forced_(context().forced, level.outer_forced_),
      inference_(context().inference, level.outer_inference_) {}

Tensors Level::run(const PrimRef& prim, Inputs in) {
  SmallVector<Tensor, 4> inners;
  SmallVector<bool, 8> batched;
  bool any = false;
  // Views of what is detached at this level are detached too.
  Ref<Storage> apart;
  if (prim->is_view() && in[0].impl()->views_detached()) apart = in[0].storage();
  for (Tensor& t : in) {
    bool b = false;
    if (mine(t)) {
      b = wrapped(t)->batched;
      inners.push_back(taken(t, *wrapped(t)));
    } else {
      inners.push_back(inner(t, b));
    }
    batched.push_back(b), any |= b;
  }
  if (vectorizes() && (any || prim->draws())) return run_batched(*this, prim, inners, batched);
  Outside scope(*this);
  Tensors out = dispatch(prim, inners);
  for (Tensor& t : out) {
    t = wrap(std::move(t), false);
    if (apart && t.storage() == apart) t.impl()->detached = true;
  }
  return out;
}

void Level::assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) {
  SmallVector<Tensor, 4> places;
  SmallVector<bool, 4> whole;
  bool any = false;
  for (const Tensor& d : dst) {
    bool b;
    places.push_back(inner(d, b));
    whole.push_back(b), any |= b;
  }
  for (const Tensor& t : in)
    if (const Wrapped* w = mine(t)) any |= w->batched;
  if (!any) {
    SmallVector<Tensor, 4> inners;
    bool b;
    for (const Tensor& t : in) inners.push_back(inner(t, b));
    Outside scope(*this);
    return tessera::assign(places, prim, inners);
  }
  Tensors values = run(prim, in);
  for (size_t i = 0; i < dst.size(); ++i) {
    bool b;
    Tensor value = inner(values[i], b);
    TESSERA_CHECK(whole[i] || !b,
                  "vmap: assign_ of {}, a value for each sample, into {}, which all samples share; "
                  "return the value from the function, or give the destination a batch dim",
                  prim->name(), describe(dst[i]));
    Outside scope(*this);
    if (whole[i] && !b) value = expand(unsqueeze(value, 0), places[i].shape());
    tessera::assign({&places[i], 1}, copy_primitive(), operands(std::move(value)));
  }
}

void Level::notice(const HostEvent& event) {
  Observer& outer = *outer_.observer;
  const auto of_this_level = [&](const Tensor& t) { return t.defined() && mine(t); };
  if (const auto* read = std::get_if<events::HandlesRead>(&event)) {
    for (const Tensor& t : read->handles)
      if (t.defined() && !mine(t)) outer.notice(events::HandlesRead{{&t, 1}});
    return;
  }
  // Gradients of leaves of this level end with it, so the observer outside is not told.
  const auto* read = std::get_if<events::SlotRead>(&event);
  const auto* change = std::get_if<events::SlotChange>(&event);
  if ((read && of_this_level(read->slot)) || (change && of_this_level(change->now))) return;
  outer.notice(event);
}

}  // namespace tessera
