#include "core/autograd/recompute.h"

#include <unordered_map>
#include <unordered_set>

#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/autograd/level.h"
#include "core/dispatch/context.h"
#include "core/dispatch/observer.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/tensor/random.h"

namespace tessera {

RecomputeOptions keeping_products() {
  return {[](const Primitive& op) { return op.traits().kind == OpKind::kProduct; }};
}

namespace recomputation {

bool is_cast(const Recipe& recipe);  // autocast.cpp: of a result whose operand has a recipe

namespace {

constexpr size_t kMostResults = 32;  // of an op, that can be recomputed; others are kept

// One op of the function, in the order in which it runs.
struct Op {
  PrimRef prim;
  bool assigns = false;
  bool draws = false;             // advances the generator's state
  bool kept = false;              // its results are in `results`
  bool stale = false;             // computed from values that the function then overwrote
  bool needed = false;            // runs in the second run
  uint32_t wanted = 0;            // bit j: a recipe waits for result j
  Metas metas;                    // of results, with their layout
  SmallVector<int, 3> producers;  // numbers of the ops that made its operands
  SmallVector<std::pair<Ref<Storage>, uint32_t>, 2> outside;  // outside operands, with versions
  Tensors results;
  SmallVector<Ref<Storage>, 1> values;  // of wanted results, from the second run
};

Storage* storage_of(const Tensor& t) { return t.storage().get(); }

}  // namespace

// A function that ran, with what the second run needs. Recipes own it.
class Region final : public RefCounted {
 public:
  Region(const RecomputeOptions& options, Function f, const List& in)
      : keep_(options.keep), f_(std::move(f)), context_(context()) {
    for (const Tensor& t : in) in_.push_back(t);
    context_.casts = nullptr;
    random_ = clone(generator_.state());
  }
  List run_first();
  Ref<Storage> value(size_t op, size_t result);
  void forget(size_t op, size_t result) {
    Op& o = ops_[op];
    o.wanted &= ~(1u << result);
    if (result < o.values.size()) o.values[result] = {};
  }
  bool keeps(const Primitive& prim, Inputs in) const {
    // Ops made above the core (collectives) may not run twice.
    const bool above = !in.empty() && prim.own_kernel(in[0].device().kind);
    return above || (keep_ && keep_(prim));
  }
  std::vector<Op>& ops() { return ops_; }
  /// The function reads a value, which may be any of those computed so far.
  void value_read() { read_before_ = ops_.size(); }
  const Storage* random_state() const { return generator_.state().storage().get(); }

 private:
  void run_again();
  void find_needed(bool all);
  bool run_second(bool all);

  std::function<bool(const Primitive&)> keep_;
  Function f_;
  List in_;
  Context context_;                            // the settings under which it ran
  Generator generator_ = default_generator();  // shares its state
  Tensor random_;                              // a copy of that state as it was then
  std::vector<Op> ops_;
  size_t read_before_ = 0;  // results of ops before this one may have been read
};

namespace {

// Stands for results that the second run does not compute: reading one notes it and throws.
class LeftOut final : public Event {
 public:
  bool done() const override { return false; }
  void wait() override {
    read_ = true;
    throw UserError(
        "recompute: when it was computed again, the function read a value that it had computed "
        "from a tensor that it then overwrote; write to it outside of the function");
  }
  bool read() const { return read_; }

 private:
  bool read_ = false;
};

class ValueRecipe final : public Recipe {
 public:
  ValueRecipe(Ref<Region> region, size_t op, size_t result)
      : region_(std::move(region)), op_(op), result_(result) {}
  ~ValueRecipe() override { region_->forget(op_, result_); }
  Ref<Storage> rebuild() override { return region_->value(op_, result_); }
  bool is_of(const Region& r) const { return region_.get() == &r; }

 private:
  Ref<Region> region_;
  const size_t op_, result_;
};

// The backend that is in front of the program's while a function runs.
class RegionBackend : public Backend {
 public:
  RegionBackend(Region& region, const DispatchTarget& outer) : region_(region), outer_(outer) {}
  int apart = 0;  // > 0: ops that run are not part of the function

 protected:
  // Runs an op behind this backend, so that ops of its decomposition are not counted.
  Tensors run_outside(const PrimRef& prim, Inputs in) {
    BackendScope scope(outer_);
    return (outer_.backend ? *outer_.backend : eager_backend()).run(prim, in);
  }
  void assign_outside(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) {
    BackendScope scope(outer_);
    (outer_.backend ? *outer_.backend : eager_backend()).assign(dst, prim, in);
  }
  Region& region_;
  const DispatchTarget outer_;
};

class FirstRun final : public RegionBackend, public Observer {
 public:
  using RegionBackend::RegionBackend;

  void notice(const HostEvent& event) override {
    if (std::holds_alternative<events::ValueRead>(event)) region_.value_read();
    if (outer_.observer) outer_.observer->notice(event);
  }

  Tensors run(const PrimRef& prim, Inputs in) override {
    if (apart) return run_outside(prim, in);
    const size_t k = begin(prim, in);
    const bool kept = !prim->is_view() && region_.keeps(*prim, in);
    Tensors out = run_outside(prim, in);
    if (prim->is_view()) return out;  // shares memory with its operand
    Op& op = region_.ops()[k];
    op.kept = kept;
    for (size_t j = 0; j < out.size(); ++j) {
      op.metas.push_back(out[j].meta());
      if (!storage_of(out[j])) continue;
      made_by_[storage_of(out[j])] = k;
      mark(out[j], k, j, kept);
    }
    if (kept) op.results = out;
    return out;
  }

  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override {
    if (apart) return assign_outside(dst, prim, in);
    const size_t k = begin(prim, in);
    region_.ops()[k].assigns = true;
    for (const Tensor& d : dst)
      if (const int by = maker_of(storage_of(d)); by >= 0) region_.ops()[k].producers.push_back(by);
    assign_outside(dst, prim, in);
    for (size_t i = 0; i < dst.size(); ++i) {
      Storage* s = storage_of(dst[i]);
      if (maker_of(s) >= 0) {
        made_by_[s] = k;
        mark(dst[i], k, i, false);
      } else if (s == region_.random_state()) {
        region_.ops()[k].draws = true;
      } else {
        overwritten(s);
      }
    }
  }

 private:
  size_t begin(const PrimRef& prim, Inputs in) {
    Op op;
    op.prim = prim;
    for (const Tensor& t : in) {
      Storage* s = storage_of(t);
      if (!s) continue;
      if (const int by = maker_of(s); by >= 0)
        op.producers.push_back(by), op.stale |= region_.ops()[size_t(by)].stale;
      else if (!s->recipe() && s != region_.random_state())
        op.outside.emplace_back(Ref<Storage>(s), s->version());
    }
    region_.ops().push_back(std::move(op));
    return region_.ops().size() - 1;
  }
  // The op that made `s`; -1 where none did. A storage that no op made (a number's, a gathered
  // weight's) may have the address of one that is gone. What ops made has the recipe of this region
  // or of an autocast, unless it is kept.
  int maker_of(const Storage* s) const {
    const auto it = made_by_.find(s);
    if (it == made_by_.end()) return -1;
    const Op& op = region_.ops()[it->second];
    const Recipe* recipe = s->recipe().get();
    const bool made = op.kept || op.metas.size() > kMostResults ||
                      (recipe && (dynamic_cast<const ValueRecipe*>(recipe) || is_cast(*recipe)));
    return made ? int(it->second) : -1;
  }
  void mark(const Tensor& t, size_t k, size_t j, bool kept) {
    if (kept || j >= kMostResults) return t.storage()->set_recipe({});
    region_.ops()[k].wanted |= 1u << j;
    t.storage()->set_recipe(Ref<Recipe>(new ValueRecipe(Ref<Region>(&region_), k, j)));
  }
  // Marks ops that read values of `s` as stale: the values are gone, so they cannot run again.
  void overwritten(const Storage* s) {
    std::vector<Op>& ops = region_.ops();
    for (size_t k = 0; k + 1 < ops.size(); ++k) {
      for (auto& [storage, version] : ops[k].outside) ops[k].stale |= storage.get() == s;
      for (int p : ops[k].producers) ops[k].stale |= ops[size_t(p)].stale;
    }
  }

  std::unordered_map<const Storage*, size_t> made_by_;
};

class SecondRun final : public RegionBackend {
 public:
  SecondRun(Region& region, const DispatchTarget& outer, const Storage* random)
      : RegionBackend(region, outer), random_(random) {}

  Tensors run(const PrimRef& prim, Inputs in) override {
    // These ops are part of backward, although the layers above see a forward pass.
    Scoped<Phase> phase(context().phase, Phase::kBackward);
    if (apart) return run_outside(prim, in);
    Op& op = next(prim, in, false);
    if (op.kept) return op.results;
    if (prim->is_view())
      return stand_ins_.contains(storage_of(in[0])) ? prim->view(in) : run_outside(prim, in);
    if (!op.needed) return stand_ins(op);
    Tensors out = run_outside(prim, in);
    for (size_t j = 0; j < out.size(); ++j) {
      made_.insert(storage_of(out[j])), stand_ins_.erase(storage_of(out[j]));
      keep_value(op, j, out[j]);
    }
    return out;
  }

  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override {
    Scoped<Phase> phase(context().phase, Phase::kBackward);
    if (apart) return assign_outside(dst, prim, in);
    Op& op = next(prim, in, true);
    if (!op.needed) return;
    for (size_t i = 0; i < dst.size(); ++i) {
      Storage* s = storage_of(dst[i]);
      if (s != random_ && !made_.contains(s)) return;  // was written by the first run
      TESSERA_CHECK(!values_.contains(s),
                    "recompute: {} was overwritten after it was saved for backward; copy it before "
                    "writing",
                    describe(dst[i]));
    }
    assign_outside(dst, prim, in);
    for (size_t i = 0; i < dst.size(); ++i) keep_value(op, i, dst[i]);
  }

  size_t count() const { return at_; }
  /// True where the function read a result that was left out.
  bool missed() const { return left_out_->read(); }

 private:
  Op& next(const PrimRef& prim, Inputs in, bool assigns) {
    std::vector<Op>& ops = region_.ops();
    const bool same =
        at_ < ops.size() && ops[at_].assigns == assigns && same_primitive(*ops[at_].prim, *prim);
    TESSERA_CHECK(same,
                  "recompute: when it was computed again, the function ran {} where it had run {}; "
                  "it must do the same each time",
                  to_string(*prim), at_ < ops.size() ? to_string(*ops[at_].prim) : "nothing");
    Op& op = ops[at_++];
    if (op.needed && !op.stale)
      for (const Tensor& t : in)
        for (auto& [storage, version] : op.outside)
          TESSERA_CHECK(storage.get() != storage_of(t) || storage->version() == version,
                        "recompute: an operand of {} ({}) was overwritten since the function ran; "
                        "run backward before the update",
                        prim->name(), describe(t));
    return op;
  }
  // Tensors without memory in place of results that backward does not need.
  Tensors stand_ins(const Op& op) {
    Tensors out;
    for (const Meta& m : op.metas) {
      Meta shape = m;
      shape.device = kMeta;
      Ref<Storage> s = empty(shape).storage();
      if (!m.device.is_meta()) s = make_ref<Storage>(s->bytes(), m.device, left_out_);
      made_.insert(s.get()), stand_ins_.insert(s.get());
      out.push_back(Tensor(m, std::move(s)));
    }
    return out;
  }
  void keep_value(Op& op, size_t j, const Tensor& t) {
    if (j >= kMostResults || !(op.wanted >> j & 1)) return;
    if (op.values.size() <= j) op.values.resize(j + 1);
    op.values[j] = t.storage();
    values_.insert(storage_of(t));
  }

  const Storage* random_;
  const Ref<LeftOut> left_out_ = make_ref<LeftOut>();
  size_t at_ = 0;
  std::unordered_set<const Storage*> made_, values_, stand_ins_;
};

// While one lives, the generator deals the keys that it dealt from state `then` on.
class Rewound {
 public:
  Rewound(const Generator& generator, const Tensor& then)
      : state_(generator.state()), now_(clone(state_)) {
    assign_(state_, then);
  }
  ~Rewound() { assign_(state_, now_); }

 private:
  Tensor state_, now_;
};

RegionBackend* current_region() {
  Backend* b = context().backend;
  return b ? dynamic_cast<RegionBackend*>(b) : nullptr;
}

Storage* values_of(const Tensor& t) { return storage_of(local_of(t)); }

}  // namespace

List Region::run_first() {
  List out;
  {
    DispatchTarget target = context().target();
    FirstRun front(*this, target);
    target.backend = &front, target.observer = &front;
    BackendScope scope(target);
    out = f_(in_);
  }
  // Results of the function itself are kept, not recomputed.
  for (const Tensor& t : out) {
    Storage* s = t.defined() ? values_of(t) : nullptr;
    if (!s || !s->recipe()) continue;
    auto* recipe = dynamic_cast<ValueRecipe*>(s->recipe().get());
    if (recipe && recipe->is_of(*this)) s->set_recipe({});
  }
  // The second run starts at the inputs: it neither needs their history nor adds to it.
  for (Tensor& t : in_) {
    if (!t.defined()) continue;
    const bool recorded = grad_meta(t) != nullptr;
    t = t.detach();
    if (recorded) t.requires_grad_();
  }
  return out;
}

Ref<Storage> Region::value(size_t op, size_t result) {
  Op& o = ops_[op];
  if (result >= o.values.size() || !o.values[result]) run_again();
  TESSERA_ASSERT(result < o.values.size() && o.values[result], "recompute: {} did not come back",
                 o.prim->name());
  return o.values[result];
}

void Region::find_needed(bool all) {
  for (size_t k = 0; k < ops_.size(); ++k) {
    Op& op = ops_[k];
    op.needed = op.wanted != 0 || op.draws || ((all || k < read_before_) && !op.stale);
  }
  for (size_t k = ops_.size(); k-- > 0;) {
    Op& op = ops_[k];
    TESSERA_CHECK(
        !op.wanted || !op.stale,
        "recompute: backward needs {}, which was computed from a tensor that the function "
        "then overwrote; write to it outside of the function",
        to_string(*op.prim));
    if (!op.needed || op.kept) continue;
    for (int p : op.producers) ops_[size_t(p)].needed = true;
  }
}

void Region::run_again() {
  Ref<Region> alive(this);
  // The function may branch on values that backward does not need. Reads by item() are known; one
  // by other means makes the first attempt fail, and then everything is computed.
  if (!run_second(false)) run_second(true);
}

// Runs the function again; false when it read a value that was left out.
bool Region::run_second(bool all) {
  find_needed(all);
  Rewound rewound(generator_, random_);
  DispatchTarget target = context().target();
  SecondRun backend(*this, target, random_state());
  Context now = context_;
  now.target() = target, now.generator = &generator_;
  now.grad_node = context().grad_node;
  Scoped<Context> again(context(), std::move(now));
  std::optional<Autocast>
      casts;  // before the backend: as in the first run, casts are ops each time
  if (context().forced & bit(Layer::kAutocast)) casts.emplace(context().autocast);
  target.backend = &backend;
  BackendScope front(target);
  try {
    f_(in_);
  } catch (...) {
    if (all || !backend.missed()) throw;
  }
  if (!all && backend.missed()) return false;
  TESSERA_CHECK(backend.count() == ops_.size(),
                "recompute: when it was computed again, the function ran {} ops, and {} before; it "
                "must do the same each time",
                backend.count(), ops_.size());
  return true;
}

List run(const RecomputeOptions& options, Function f, const List& in) {
  // Such a run is part of another recomputed function, or has values that backward never reads.
  if (!grad_enabled() || current_region() || current_level()) return f(in);
  return make_ref<Region>(options, std::move(f), in)->run_first();
}

bool running_again() { return dynamic_cast<SecondRun*>(context().backend) != nullptr; }

Apart::Apart() : region_(current_region()) {
  if (region_) ++static_cast<RegionBackend*>(region_)->apart;
}
Apart::~Apart() {
  if (region_) --static_cast<RegionBackend*>(region_)->apart;
}

}  // namespace recomputation
}  // namespace tessera
