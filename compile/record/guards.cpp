#include "compile/record/guards.h"

#include <algorithm>
#include <unordered_set>

#include "core/autograd/graph.h"
#include "core/dispatch/sharding.h"

namespace tessera::compiler {
namespace {

bool is_leaf(const Tensor& t) {
  GradMeta* meta = grad_meta(t);
  return meta && !meta->producer;
}

// True for a tensor that backward can still be called through.
bool has_history(const Tensor& t) {
  GradMeta* meta = grad_meta(t);
  return meta && meta->producer && !meta->producer->released();
}

bool same_place(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  const Tensor &x = local_of(a), &y = local_of(b);
  return x.storage() == y.storage() && x.offset() == y.offset() && x.shape() == y.shape() &&
         x.strides() == y.strides() && x.dtype() == y.dtype();
}

bool same_guards(const Source& a, const Source& b) {
  if (a.kind != b.kind || a.index != b.index || a.offset != b.offset || a.fresh != b.fresh ||
      a.inference != b.inference)
    return false;
  return a.kind == Source::kNone || same_place(a.like, b.like);
}

// True if only the GuardedObjects still hold it.
bool is_gone(const RefCounted& object) { return object.use_count() == 1; }

HandleState state_of(const TensorImpl& handle) {
  const auto* meta = static_cast<const GradMeta*>(handle.autograd.get());
  return meta ? HandleState{meta, meta->sink, meta->replaced} : HandleState();
}

class GuardMaker {
 public:
  GuardMaker(const StepRecorder& recorder, std::span<const Tensor> inputs, GuardedObjects& guarded)
      : recorder_(recorder), inputs_(inputs), guarded_(guarded), held_(recorder.provided().size()) {
    for (const ImplicitInput& i : recorder.last_graph().implicit)
      implicit_.insert(i.tensor.storage().get());
  }

  std::string make_guards(const Tensors& results, CachedCall& entry) {
    if (!recorder_.break_reason().empty()) return recorder_.break_reason();
    if (recorder_.segments() != 1)
      return fmt::format("it was {} graphs instead of one", recorder_.segments());
    for (const Tensor& t : results) {
      Source source = source_of(t);
      // Only the list of results and `source` hold it, so each call of the program makes a new
      // handle.
      if (source.kind == Source::kExisting && !grad_meta(t) && t.impl()->use_count() == 2)
        source.like = t.detach(), source.fresh = true;
      entry.results.push_back(std::move(source));
      bool made = entry.results.back().kind == Source::kOutput;
      if (t.defined() && (has_history(t) || (made && is_leaf(t))))
        return "a result can still be differentiated; return it detached";
    }
    for (const TouchedSlot& s : recorder_.slots())
      if (std::string why = add_slot(s, entry); !why.empty()) return why;
    for (size_t i = 0; i < held_.size(); ++i)
      if (!held_[i])
        return fmt::format(
            "a tensor made by {} outlives the call; return it, or write it with assign_",
            producer_of(recorder_.last_graph().outputs[i]));
    for (const TouchedHandle& h : recorder_.handles()) {
      if (state_of(*h.handle.impl()) != h.before)
        return fmt::format("whether {} requires a gradient, or where that goes, changes in it",
                           describe(h.handle));
      entry.handles.push_back({guarded_.keep(h.handle.impl()), h.before});
    }
    for (const TouchedSetting& s : recorder_.settings())
      entry.settings.push_back({.owner = guarded_.keep(s.owner.get()),
                                .seen = s.seen,
                                .changed = s.changed,
                                .before = s.before,
                                .after = s.after,
                                .depends = s.depends});
    if (std::string why = assigned_before(); !why.empty()) return why;
    for (const ImplicitInput& i : recorder_.last_graph().implicit)
      entry.implicit.push_back(i.tensor);
    for (const Tensor& t : entry.implicit) entry.reached.push_back(t.storage().get());
    std::ranges::sort(entry.reached);
    return "";
  }

 private:
  Source source_of(const Tensor& t) {
    if (!t.defined()) return {};
    const Tensor& local = local_of(t);
    auto& provided = recorder_.provided();
    for (size_t i = 0; i < provided.size(); ++i)
      if (provided[i] == local.storage()) {
        held_[i] = true;
        return {.kind = Source::kOutput,
                .index = i,
                .like = without_values(t.detach()),
                .offset = local.offset(),
                .inference = t.impl()->inference};
      }
    for (size_t i = 0; i < inputs_.size(); ++i)
      if (inputs_[i].storage() == local.storage())
        return {.kind = Source::kInput,
                .index = i,
                .like = without_values(t.detach()),
                .offset = local.offset() - inputs_[i].offset(),
                .inference = t.impl()->inference};
    return {.kind = Source::kExisting, .like = t};
  }

  std::string add_slot(const TouchedSlot& s, CachedCall& entry) {
    CachedSlot slot{.owner = guarded_.keep(s.owner.get()),
                    .seen = s.seen,
                    .changed = s.changed,
                    .depends = s.depends};
    slot.before = s.before;
    bool read = s.before.defined() && implicit_.contains(local_of(s.before).storage().get());
    if (read && s.changed && !s.after.defined())
      return "gradients that were made outside of it are read and let go; put backward into the "
             "same function";
    if (read && s.changed && !same_place(s.after, s.before))
      return "gradients accumulate over calls; call zero_grad inside of the step";
    slot.depends |= read;
    if (s.changed) slot.after = source_of(s.after);
    entry.slots.push_back(std::move(slot));
    return "";
  }

  // Memory from outside that has a history afterwards, which a replay would not give it.
  std::string assigned_before() const {
    const Graph& g = recorder_.last_graph();
    std::unordered_set<ValueId> written;
    for (const Node& n : g.nodes)
      for (ValueId into : n.into) written.insert(g[into].buffer);
    auto changes = [&](ValueId id, const Tensor& t) {
      return t.storage()->assigned() && written.contains(g[id].buffer);
    };
    for (const ImplicitInput& i : g.implicit)
      if (changes(i.id, i.tensor))
        return fmt::format("a recorded value is assigned to {}, which was made outside of it",
                           describe(i.tensor));
    for (size_t i = 0; i < inputs_.size() && i < g.inputs.size(); ++i)
      if (changes(g.inputs[i], inputs_[i]))
        return fmt::format("a recorded value is assigned to its input {}", describe(inputs_[i]));
    return "";
  }

  std::string producer_of(ValueId id) const {
    const Graph& g = recorder_.last_graph();
    for (const Node& n : g.nodes)
      for (ValueId out : n.out)
        if (g[out].buffer == g[id].buffer)
          return fmt::format("{} ({})", n.prim->name(), g.scopes[size_t(n.scope)]);
    return "the call";
  }

  const StepRecorder& recorder_;
  std::span<const Tensor> inputs_;
  GuardedObjects& guarded_;
  std::vector<bool> held_;
  std::unordered_set<const Storage*> implicit_;
};

}  // namespace

void GuardedObjects::keep_only(std::span<const CachedCall* const> entries) {
  std::unordered_set<const RefCounted*> wanted;
  for (const CachedCall* e : entries) {
    for (const CachedSlot& s : e->slots) wanted.insert(s.owner);
    for (const CachedSetting& s : e->settings) wanted.insert(s.owner);
    for (const CachedHandle& h : e->handles) wanted.insert(h.handle);
  }
  std::erase_if(kept_, [&](const auto& kept) { return !wanted.contains(kept.first); });
}

Tensor give(const Source& s, const Tensors& outputs, std::span<const Tensor> inputs) {
  if (s.kind == Source::kNone) return {};
  if (s.kind == Source::kExisting) return s.fresh ? s.like.detach() : s.like;
  const Tensor& from = s.kind == Source::kOutput ? outputs[s.index] : inputs[s.index];
  const Tensor& local = local_of(s.like);
  Tensor t(local.meta(), from.storage(), from.offset() + s.offset);
  if (const ShardingLayer* sharding = sharding_of(s.like))
    t = sharding->with_local(s.like.meta(), t);
  t.impl()->inference = s.inference;
  return t;
}

std::string make_guards(const StepRecorder& recorder, std::span<const Tensor> inputs,
                        const Tensors& results, GuardedObjects& guarded, CachedCall& entry) {
  return GuardMaker(recorder, inputs, guarded).make_guards(results, entry);
}

bool guards_may_hold(const CachedCall& e) {
  for (const CachedHandle& h : e.handles)
    if (is_gone(*h.handle) || state_of(*h.handle) != h.before) return false;
  return true;
}

bool guards_hold(const CachedCall& e, std::span<const Tensor> inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Storage* s = inputs[i].storage().get();
    if (s == e.inputs[i].get()) continue;
    // If an argument is memory that the program also reaches in another way, the graph would be
    // another.
    if (!e.any[i] || std::ranges::binary_search(e.reached, s)) return false;
  }
  return guards_hold(e);
}

bool guards_hold(const CachedCall& e) {
  for (const CachedSetting& s : e.settings)
    if (is_gone(*s.owner) || (s.depends && *s.seen != s.before)) return false;
  for (const CachedSlot& s : e.slots)
    if (is_gone(*s.owner) || (s.depends && !same_place(*s.seen, s.before))) return false;
  return guards_may_hold(e);
}

bool same_guards(const CachedCall& a, const CachedCall& b) {
  if (a.settings != b.settings || a.handles != b.handles || !(a.returned == b.returned))
    return false;
  if (a.slots.size() != b.slots.size() || a.results.size() != b.results.size()) return false;
  if (a.implicit.size() != b.implicit.size()) return false;
  for (size_t i = 0; i < a.implicit.size(); ++i)
    if (!same_place(a.implicit[i], b.implicit[i])) return false;
  for (size_t i = 0; i < a.results.size(); ++i)
    if (!same_guards(a.results[i], b.results[i])) return false;
  for (size_t i = 0; i < a.slots.size(); ++i) {
    const CachedSlot &s = a.slots[i], &t = b.slots[i];
    if (s.owner != t.owner || s.changed != t.changed || !same_guards(s.after, t.after))
      return false;
  }
  return true;
}

}  // namespace tessera::compiler
