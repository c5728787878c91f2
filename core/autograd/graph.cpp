#include "core/autograd/graph.h"

#include <algorithm>

#include "core/autograd/assigned.h"
#include "core/autograd/autograd.h"
#include "core/autograd/level.h"
#include "core/dispatch/context.h"
#include "core/dispatch/sharding.h"

namespace tessera {

GradMode::GradMode(bool on)
    : enabled_(context().enabled, LayerMask(on ? context().enabled | bit(Layer::kAutograd)
                                               : context().enabled & ~bit(Layer::kAutograd))) {}
InferenceMode::InferenceMode() : inference_(context().inference, true) {}
bool grad_enabled() { return context().enabled & bit(Layer::kAutograd); }

namespace {

uint64_t& newest_number() {
  thread_local uint64_t number = 0;
  return number;
}

}  // namespace

GradNode::GradNode() : number(++newest_number()) {}
uint64_t GradNode::last_number() { return newest_number(); }

void GradNode::come_after(const GradNode& producer) {
  newest_number() = std::max(newest_number(), producer.number);
  number = ++newest_number();
}

// Frees inputs in a loop; recursion would go as deep as a chain of nodes is long.
GradNode::~GradNode() {
  std::vector<Ref<GradMeta>> doomed;
  for (auto& meta : inputs) doomed.push_back(std::move(meta));
  while (!doomed.empty()) {
    Ref<GradMeta> meta = std::move(doomed.back());
    doomed.pop_back();
    if (!meta || meta->use_count() > 1 || !meta->producer || meta->producer->use_count() > 1)
      continue;
    for (auto& next : meta->producer->inputs) doomed.push_back(std::move(next));
  }
}

void attach_grad_meta(const Tensor& t, Ref<GradNode> producer, int output) {
  auto meta = make_ref<GradMeta>();
  if (producer) t.impl()->detached = false;
  meta->producer = std::move(producer);
  meta->output = output;
  if (Storage::any_assigned()) [[unlikely]]
    meta->seen = assignments_to(t);
  t.impl()->autograd = std::move(meta);
  t.impl()->layers |= bit(Layer::kAutograd);
}

namespace {

// The storage of the values of `t`, or of this rank's piece of them; null where there is none.
Storage* values_of(const Tensor& handle) { return local_of(innermost(handle)).storage().get(); }

Tensor rebuilt(const Tensor& t, Recipe& recipe) {
  const ShardingLayer* sharding = sharding_of(t);
  if (!sharding) return Tensor(t.meta(), recipe.rebuild(), t.offset()).detach();
  const Tensor& local = sharding->local;
  return sharding->with_local(t.meta(), Tensor(local.meta(), recipe.rebuild(), local.offset()));
}

// Stands for values that are not there: reading them throws.
class Unreadable final : public Event {
 public:
  explicit Unreadable(std::string why) : why_(std::move(why)) {}
  bool done() const override { return false; }
  void wait() override { throw UserError(why_); }

 private:
  const std::string why_;
};

Tensor unreadable_for(const Tensor& t, const Ref<Event>& why) {
  if (const Wrapped* w = wrapped(t)) return wrapper(w->with(unreadable_for(w->inner, why)));
  auto without = [&](const Tensor& local) {
    const size_t bytes = size_t(local.offset() + reach_of(local.shape(), local.strides()));
    return Tensor(local.meta(),
                  make_ref<Storage>(bytes * size_of(local.dtype()), local.device(), why),
                  local.offset())
        .detach();
  };
  const ShardingLayer* sharding = sharding_of(t);
  return sharding ? sharding->with_local(t.meta(), without(sharding->local)) : without(t);
}

void share_history(const Tensor& to, const Tensor& from) {
  if (!grad_meta(from)) return;
  to.impl()->autograd = from.impl()->autograd;
  to.impl()->layers |= bit(Layer::kAutograd);
}

}  // namespace

Tensor unreadable(const Tensor& t, std::string why) {
  return unreadable_for(t, make_ref<Unreadable>(std::move(why)));
}

SavedTensor SavedTensor::input(const Tensor& t) {
  TESSERA_CHECK(!t.impl()->inference,
                "backward: {} was made in inference mode and cannot be saved; clone it outside",
                describe(t));
  SavedTensor s;
  s.tensor_ = t;
  if (Storage* values = values_of(t)) {
    s.version_ = values->version();
    values->mark_saved();
    // A wrapper also keeps the history of the levels outside, which a recipe would lose.
    if (values->recipe() && !wrapped(t)) [[unlikely]] {
      s.recipe_ = values->recipe();
      s.tensor_ = without_values(t);
      share_history(s.tensor_, t);
    }
  }
  return s;
}

SavedTensor SavedTensor::result(const Tensor& t, int output) {
  SavedTensor s = input(without_history(t));
  s.output_ = int8_t(output);
  return s;
}

SavedTensor SavedTensor::shape_only(const Tensor& t) {
  SavedTensor s;
  s.tensor_ = without_values(t);
  return s;
}

bool SavedTensor::overwritten() const {
  if (let_go_) return true;
  const Storage* values = values_of(tensor_);
  return values && values->version() != version_;
}

void SavedTensor::let_go_of_overwritten(std::vector<Ref<GradNode>>& from) {
  if (!tensor_.defined() || recipe_ || let_go_) return;
  if (overwritten())
    tensor_ = without_values(tensor_), let_go_ = true;
  else if (const Storage* values = values_of(tensor_))
    append_histories(*values, from);
}

Tensor SavedTensor::unpack(std::string_view op, const char* what, size_t index,
                           const Ref<GradNode>& owner) const {
  Tensor t = tensor_;
  if (recipe_) [[unlikely]] {
    t = rebuilt(tensor_, *recipe_);
    share_history(t, tensor_);
  } else if (t.defined() && overwritten()) [[unlikely]] {
    // A vjp that does not read them works (the gradient of y * 2.0 needs no y).
    t = unreadable(tensor_, fmt::format("{}: {} {} ({}) was overwritten after it was saved for "
                                        "backward; copy it before writing",
                                        op, what, index, describe(t)));
    share_history(t, tensor_);
  }
  // Only a backward that is itself recorded needs the history.
  if (output_ < 0 || !owner || !(context().enabled & bit(Layer::kAutograd))) return t;
  t = without_history(t);
  attach_grad_meta(t, owner, output_);
  return t;
}

}  // namespace tessera
