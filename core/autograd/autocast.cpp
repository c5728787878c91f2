// Casts of operands by the precision that their op states. The casts of weights are cached, since
// weights are cast again and again; each use gets a history of its own, so that gradients of
// several uses are added in f32 and one backward does not release the casts of another.
#include "core/autograd/autocast.h"

#include <algorithm>
#include <unordered_map>

#include "core/autograd/autograd.h"
#include "core/autograd/level.h"
#include "core/dispatch/context.h"
#include "core/dispatch/precision.h"
#include "core/ops/pointwise.h"

namespace tessera {
namespace recomputation {

// The recipe of a cast whose operand has a recipe itself, because its values are not worth keeping
// (a gathered weight): it rebuilds the operand and casts it again.
class CastAgain final : public Recipe {
 public:
  CastAgain(Ref<Recipe> source, const Tensor& from, DType to)
      : source_(std::move(source)), meta_(from.meta()), offset_(from.offset()), to_(to) {}
  Ref<Storage> rebuild() override {
    return cast(Tensor(meta_, source_->rebuild(), offset_), to_).storage();
  }

 private:
  Ref<Recipe> source_;
  Meta meta_;
  int64_t offset_;
  DType to_;
};

bool is_cast(const Recipe& recipe) { return dynamic_cast<const CastAgain*>(&recipe); }

}  // namespace recomputation

namespace {

using recomputation::CastAgain;

const Ref<Recipe>& recipe_of(const Tensor& t) {
  static const Ref<Recipe> none;
  const Ref<Storage>& values = local_of(t).storage();
  return values ? values->recipe() : none;
}

bool is_parameter(const Tensor& t) {
  const GradMeta* meta = grad_meta(t);
  return meta && !meta->producer;
}

}  // namespace

// Casts made while ops went to one backend. With another backend it is not used: that one does not
// know values a recorder has only promised, and a recording would freeze values from before it.
class CastCache {
 public:
  explicit CastCache(bool enabled) : enabled_(enabled), backend_(context().backend) {}

  Tensor cast_to(const Tensor& t, DType to) {
    // Inside a function transform a kept cast would be a constant of the levels outside.
    if (!enabled_ || context().backend != backend_ || current_level() || !is_parameter(t))
      return cast(t, to);
    const Ref<Storage>& storage = local_of(t).storage();
    if (!storage) return cast(t, to);
    Entry& e = entries_[{t.impl(), to}];
    if (!e.value.defined() || e.storage != storage || e.version != storage->version()) {
      NoGrad off;
      Scoped<bool> may_be_recorded_later(context().inference, false);
      e = {t, storage, storage->version(), cast(t.detach(), to)};
    }
    Tensor value = e.value.detach();
    if (grad_enabled()) give_history(cast_primitive(to), {&t, 1}, {&value, 1});
    return value;
  }

 private:
  struct Entry {
    Tensor source, value = {};
    Ref<Storage> storage = nullptr;
    uint32_t version = 0;
    Entry() = default;
    Entry(const Tensor& source, Ref<Storage> storage, uint32_t version, Tensor value)
        : source(source), value(std::move(value)), storage(std::move(storage)), version(version) {}
  };
  using Key = std::pair<const TensorImpl*, DType>;
  struct Hash {
    size_t operator()(const Key& k) const {
      return std::hash<const void*>()(k.first) * kNumDTypes + size_t(k.second);
    }
  };
  const bool enabled_;
  const Backend* const backend_;
  std::unordered_map<Key, Entry, Hash> entries_;
};

namespace {

Tensor lowered(const Tensor& t, DType to) {
  if (const Ref<Recipe>& recipe = recipe_of(t)) [[unlikely]] {
    Tensor low = cast(t, to);
    local_of(low).storage()->set_recipe(Ref<Recipe>(new CastAgain(recipe, local_of(t), to)));
    return low;
  }
  return context().casts->cast_to(t, to);
}

bool is_low(const Tensor& t) { return t.dtype() == kF16 || t.dtype() == kBF16; }
// f64 is asked for by name.
bool is_precise(const Tensor& t) { return t.dtype() == kF64; }

void cast_operands(Precision precision, Inputs in) {
  const DType low = context().autocast;
  switch (precision) {
    case Precision::kLow:
      if (std::ranges::none_of(in, is_precise))
        for (Tensor& t : in)
          if (is_differentiable(t.dtype()) && t.dtype() != low) t = lowered(t, low);
      return;
    case Precision::kWide:
      for (Tensor& t : in)
        if (is_low(t)) t = cast(std::move(t), kF32);
      return;
    case Precision::kWidest:
      if (std::ranges::all_of(
              in, [](const Tensor& t) { return is_floating(t.dtype()) && !is_precise(t); }))
        promote_operands(in);
      return;
    case Precision::kUnstated:
    case Precision::kAsGiven: return;
  }
}

}  // namespace

Autocast::Autocast(DType dtype, AutocastOptions o)
    : own_(context().casts ? nullptr : new CastCache(o.cache_weights)),
      forced_(context().forced,
              LayerMask(o.enabled && dtype != kF32 ? context().forced | bit(Layer::kAutocast)
                                                   : context().forced & ~bit(Layer::kAutocast))),
      dtype_(context().autocast, o.enabled ? dtype : kF32),
      casts_(context().casts, own_ ? own_.get() : context().casts) {
  TESSERA_CHECK(dtype == kF16 || dtype == kBF16 || dtype == kF32,
                "autocast: {} is no dtype to compute products in; give bf16, f16 or f32 (off)",
                name_of(dtype));
}
Autocast::~Autocast() = default;

bool autocast_on() {
  const Context& c = context();
  return (c.forced & c.enabled & bit(Layer::kAutocast)) && c.phase == Phase::kForward;
}

void autocast_operands(Precision precision, Inputs in) {
  if (autocast_on()) cast_operands(precision, in);
}

Tensors autocast_layer(const PrimRef& prim, Inputs in) {
  autocast_operands(prim->traits().precision, in);
  return dispatch_below(Layer::kAutocast, prim, in);
}

}  // namespace tessera
