#include "parallel/fsdp.h"

#include <algorithm>
#include <deque>
#include <map>

#include "core/autograd/autograd.h"
#include "core/dispatch/sharding.h"
#include "core/nn/containers.h"
#include "core/ops/pointwise.h"
#include "parallel/path_pattern.h"

namespace tessera::parallel {
namespace {

using nn::Module;

// Of this rank's piece, where the tensor is sharded.
int64_t bytes_of(const Tensor& t) {
  const ShardData* shard = shard_data(t);
  return int64_t((shard ? shard->local : t).nbytes());
}

// One parameter: the sharded leaf that the program sees, and the whole one while it is gathered.
struct Param {
  std::string name;
  std::vector<Tensor*> slots;
  Tensor sharded;      // over all axes, data-parallel ones included
  Layout whole, term;  // layouts of the gathered weight and of a rank's gradient over the same mesh
  DeviceMesh rest;     // axes that stay (tensor parallel); undefined: none
  Layout rest_layout;
  Tensor leaf;  // shape and history of the whole weight; its gradient is delivered to us
  Tensor full;  // the whole weight while the group is gathered
  Storage* values = nullptr;  // of `sharded` when it was gathered, and its version then
  uint32_t version = 0;
  Tensor gradient;             // whole: of this backward, or accumulated while sync is off
  Tensor reduced;              // this rank's piece of the sum over ranks, perhaps pending
  std::vector<Tensor> levels;  // of the accumulation tree
};

struct Group {
  std::string path;
  std::vector<Param> params;
  bool is_root = false, gathered = false;
  bool recorded = false;              // gathered for a forward that is recorded
  size_t trainable = 0, arrived = 0;  // parameters that have gradients; that got theirs
  int64_t whole_bytes = 0;
};

class State;

// How a gathered weight comes back in backward.
class GatherAgain final : public Recipe {
 public:
  GatherAgain(std::weak_ptr<State> state, size_t group, size_t param, uint32_t version)
      : state_(std::move(state)), group_(group), param_(param), version_(version) {}
  Ref<Storage> rebuild() override;

 private:
  std::weak_ptr<State> state_;
  size_t group_, param_;
  uint32_t version_;  // of this rank's piece when the weight was used
};

class State final : public Fsdp, public GradSink, public std::enable_shared_from_this<State> {
 public:
  State(Module& model, const FsdpOptions& options);
  ~State() override;
  void attach(Module& model);

  // Fsdp
  void set_sync(bool sync) override;
  bool sync() const override { return sync_; }
  FsdpMemory memory() const override { return memory_; }
  double communication_ms() override;
  void unshard() override;
  void reshard() override;

  // GradSink
  void deliver(int slot, Tensor grad) override;
  void backward_finished() override;
  void backward_abandoned() override;

  Ref<Storage> rebuild(size_t group, size_t param, uint32_t version);

 private:
  void make_groups(Module& model);
  void shard(Param& p, Module& model);
  void before_forward(size_t group, Inputs in);
  void after_forward(size_t group, Tensor& out);
  void forward_failed(size_t group);
  void check_unchanged(const Group& g) const;

  void gather(Group& g);
  void gather(size_t group, size_t param);
  bool stale(const Group& g) const;
  void release(Group& g);
  void put_sharded_into_slots(Group& g);
  void prefetch(size_t group, int direction);

  void complete(Group& g);
  void reduce(Param& p);
  void settle_first();
  void accumulate(Param& p, Tensor piece);
  void drop_gradient(Param& p);
  void name_unused(const Group& g);
  void note_work(const Tensor& t);
  void abort(const std::string& why);
  ProcessGroup& process_group() const { return *options_.mesh.group(options_.mesh.ndim() - 1); }

  FsdpOptions options_;
  std::vector<Group> groups_;
  std::vector<std::pair<size_t, size_t>> places_;  // of each slot number: group, parameter
  std::vector<size_t> order_, last_order_;  // groups as forward reached them; of the last step
  std::deque<Param*> on_their_way_;         // gradients that are being reduced, oldest first
  int64_t most_gradient_bytes_ = 0;         // whole ones that may be alive at a time
  std::vector<Ref<Work>> works_, last_works_;
  FsdpMemory memory_;
  int64_t micro_batch_ = 0;  // since gradients were cleared
  bool sync_ = true, pinned_ = false, delivered_ = false, sent_ = false;
};

Ref<Storage> GatherAgain::rebuild() {
  std::shared_ptr<State> state = state_.lock();
  TESSERA_CHECK(state, "fully_shard: backward through a model that is gone");
  return state->rebuild(group_, param_, version_);
}

// ---- making

bool has_number_for_name(const std::string& path) {
  std::string last = path.substr(path.rfind('.') + 1);
  return !last.empty() && std::ranges::all_of(last, [](char c) { return c >= '0' && c <= '9'; });
}

// Paths of the modules that make a group of their own, outermost only.
std::vector<std::string> group_paths(Module& model, const std::vector<std::string>& patterns) {
  std::vector<std::string> paths;
  std::vector<bool> used(patterns.size());
  for (auto& [path, module] : model.named_modules()) {
    bool chosen = patterns.empty() && has_number_for_name(path);
    for (size_t i = 0; i < patterns.size(); ++i)
      if (matches(patterns[i], path)) chosen = used[i] = true;
    bool inside = std::ranges::any_of(
        paths, [&](const std::string& outer) { return path.starts_with(outer + "."); });
    if (chosen && !path.empty() && !inside) paths.push_back(path);
  }
  for (size_t i = 0; i < patterns.size(); ++i)
    TESSERA_CHECK(used[i], "fully_shard: no module is called \"{}\"", patterns[i]);
  return paths;
}

State::State(Module& model, const FsdpOptions& options) : options_(options) {
  if (!options_.mesh.defined())
    options_.mesh = init_device_mesh({{"dp", world().size()}}, world_group());
  TESSERA_CHECK(options_.mesh.ndim() <= 2,
                "fully_shard: a mesh of {} axes ({}); give one, or two of which the first "
                "replicates",
                options_.mesh.ndim(), options_.mesh.to_string());
  make_groups(model);
  int64_t root_gradients = 0, group_gradients = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    int64_t gradients = 0;
    for (size_t i = 0; i < groups_[g].params.size(); ++i) {
      Param& p = groups_[g].params[i];
      shard(p, model);
      if (GradMeta* meta = grad_meta(p.leaf)) {
        meta->sink = this;
        meta->slot = int(places_.size());
        ++groups_[g].trainable;
        gradients += bytes_of(p.leaf) / int64_t(size_of(p.leaf.dtype())) *
                     int64_t(size_of(options_.precision.reduce.value_or(p.leaf.dtype())));
      }
      places_.emplace_back(g, i);
      groups_[g].whole_bytes += bytes_of(p.leaf);
      memory_.sharded += bytes_of(p.sharded);
    }
    memory_.largest_group = std::max(memory_.largest_group, groups_[g].whole_bytes);
    int64_t& most = groups_[g].is_root ? root_gradients : group_gradients;
    most = std::max(most, gradients);
  }
  // Those of the model's own group come first and last, the others group by group.
  most_gradient_bytes_ = root_gradients + group_gradients;
}

State::~State() {
  for (Group& g : groups_)
    for (Param& p : g.params)
      if (GradMeta* meta = grad_meta(p.leaf)) meta->sink = nullptr;
}

void State::make_groups(Module& model) {
  std::vector<std::string> paths = group_paths(model, options_.groups);
  std::map<const TensorImpl*, std::pair<std::string, std::vector<nn::Slot>>> by_tensor;
  std::vector<const TensorImpl*> order;
  for (nn::Slot& s : model.slots()) {
    if (s.is_buffer) continue;
    std::string home;
    for (const std::string& path : paths)
      if (s.name.starts_with(path + ".")) home = path;
    auto [it, first] = by_tensor.try_emplace(s.tensor->impl());
    if (first) it->second.first = home, order.push_back(s.tensor->impl());
    if (it->second.first != home) it->second.first.clear();  // tied between groups: the model's own
    it->second.second.push_back(std::move(s));
  }
  TESSERA_CHECK(!order.empty(), "fully_shard: {} has no parameters", model.type_name());
  paths.insert(paths.begin(), "");
  for (const std::string& path : paths) {
    Group g;
    g.path = path;
    g.is_root = path.empty();
    for (const TensorImpl* t : order) {
      auto& [home, slots] = by_tensor.at(t);
      if (home != path) continue;
      Param& p = g.params.emplace_back();
      p.name = slots[0].name;
      p.sharded = *slots[0].tensor;
      for (nn::Slot& s : slots) p.slots.push_back(s.tensor);
    }
    if (g.is_root || !g.params.empty()) groups_.push_back(std::move(g));
  }
}

// The piece of this rank becomes the parameter.
void State::shard(Param& p, Module& model) {
  const DeviceMesh& dp = options_.mesh;
  Tensor old = p.sharded;
  int dim = options_.shard_dim ? options_.shard_dim(p.name, old) : 0;
  TESSERA_CHECK_AS(ShardingError, old.ndim() > 0 && dim >= 0 && dim < old.ndim(),
                   "fully_shard: parameter {} ({}) cannot be sharded by dim {}", p.name,
                   describe(old), dim);
  Layout cut(size_t(dp.ndim()), Replicate());
  cut.back() = Shard(dim);
  Tensor whole = old.detach(), piece;
  DeviceMesh mesh = dp;
  if (old.is_sharded()) {
    p.rest = mesh_of(old);
    p.rest_layout = layout_of(old);
    mesh = dp.joined(p.rest);
    for (const std::string& axis : p.rest.axes()) {
      TESSERA_CHECK(!dp.has_axis(axis),
                    "fully_shard: parameter {} is sharded over axis \"{}\" already", p.name, axis);
      TESSERA_CHECK(mesh.axis(axis) >= dp.ndim(),
                    "fully_shard: axis \"{}\", over which {} is sharded, must come after the "
                    "data-parallel axes of mesh ({})",
                    axis, p.name, mesh.to_string());
    }
    whole = to_local(whole);
  }
  piece = to_local(distribute(whole, dp, cut));
  if (piece.device().is_meta()) piece = empty(piece.shape(), piece.dtype());
  Layout layout = cut;
  p.whole = Layout(size_t(dp.ndim()), Replicate());
  p.term = Layout(size_t(dp.ndim()), Partial(ReduceOp::kAvg));
  for (const Placement& r : p.rest_layout)
    layout.push_back(r), p.whole.push_back(r), p.term.push_back(r);
  p.sharded = from_local(piece, mesh, layout, old.shape());
  // Where the dp axes cut is not seen by the rest: shape and history of what forward will use.
  DType t = options_.precision.param.value_or(old.dtype());
  Tensor shape_only(Meta::contiguous(whole.shape(), t, piece.device()), nullptr);
  p.leaf =
      p.rest.defined() ? from_local(shape_only, p.rest, p.rest_layout, old.shape()) : shape_only;
  if (old.requires_grad()) p.leaf.requires_grad_(), p.sharded.requires_grad_();
  model.replace(old, p.sharded);
}

void State::attach(Module& model) {
  auto self = shared_from_this();
  for (size_t g = 0; g < groups_.size(); ++g) {
    Module& m = model.submodule(groups_[g].path);
    // Outside of other wrappers' hooks: those see whole weights.
    m.add_pre_hook([self, g](Module&, Inputs in) { self->before_forward(g, in); }, true);
    m.add_post_hook([self, g](Module&, Inputs, Tensor& out) { self->after_forward(g, out); });
    m.add_unwind_hook([self, g](Module&) { self->forward_failed(g); });
  }
}

// ---- gathering

void State::note_work(const Tensor& t) {
  if (t.storage() && t.storage()->ready())
    if (auto* work = dynamic_cast<Work*>(t.storage()->ready().get())) works_.emplace_back(work);
}

// Starts the gather of one parameter; its values may be pending.
void State::gather(size_t group, size_t param) {
  Group& g = groups_[group];
  Param& p = g.params[param];
  const Tensor& local = shard_data(p.sharded)->local;
  p.values = local.storage().get();
  p.version = p.values->version();
  Tensor shards = p.sharded.detach();
  if (options_.precision.param) shards = cast(shards, *options_.precision.param);
  Tensor whole = to_local(redistribute(shards, p.whole));
  if (grad_enabled() || context().phase == Phase::kBackward) note_work(whole);
  bool keep = g.is_root || !options_.reshard_after_forward || process_group().size() == 1;
  if (!keep && grad_enabled())
    whole.storage()->set_recipe(
        Ref<Recipe>(new GatherAgain(weak_from_this(), group, param, p.version)));
  p.full = p.rest.defined() ? from_local(whole, p.rest, p.rest_layout, p.sharded.shape())
                            : whole.detach();
  if (grad_meta(p.leaf)) {  // one history for all forwards, so that each gradient comes once
    p.full.impl()->autograd = p.leaf.impl()->autograd;
    p.full.impl()->layers |= bit(Layer::kAutograd);
  }
}

bool State::stale(const Group& g) const {
  for (const Param& p : g.params) {
    const Tensor& local = shard_data(p.sharded)->local;
    if (local.storage().get() != p.values || p.values->version() != p.version) return true;
  }
  return false;
}

void State::gather(Group& g) {
  bool unfit = grad_enabled() && !g.recorded;  // left by a forward that was not recorded
  if (g.gathered && (unfit || stale(g))) release(g);
  if (g.gathered) return;
  Scoped<bool> may_be_recorded_later(context().inference, false);
  g.recorded = grad_enabled();
  size_t group = size_t(&g - groups_.data());
  for (size_t i = 0; i < g.params.size(); ++i) gather(group, i);
  g.gathered = true;
  memory_.gathered += g.whole_bytes;
  memory_.gathered_peak = std::max(memory_.gathered_peak, memory_.gathered);
}

void State::release(Group& g) {
  if (!g.gathered) return;
  for (Param& p : g.params) p.full = {};
  g.gathered = false;
  memory_.gathered -= g.whole_bytes;
}

void State::put_sharded_into_slots(Group& g) {
  for (Param& p : g.params)
    for (Tensor* slot : p.slots) *slot = p.sharded;
}

// Gathers the neighbour of `group` in the order of the last forward.
void State::prefetch(size_t group, int direction) {
  if (!options_.prefetch) return;
  auto it = std::ranges::find(last_order_, group);
  if (it == last_order_.end()) return;
  int64_t next = it - last_order_.begin() + direction;
  if (next >= 0 && next < int64_t(last_order_.size())) gather(groups_[last_order_[size_t(next)]]);
}

Ref<Storage> State::rebuild(size_t group, size_t param, uint32_t version) {
  const Param& p = groups_[group].params[param];
  TESSERA_CHECK(shard_data(p.sharded)->local.storage()->version() == version,
                "fully_shard: {} was overwritten after it was saved for backward; run backward "
                "before the update",
                p.name);
  gather(groups_[group]);
  prefetch(group, -1);
  const Tensor& full = groups_[group].params[param].full;
  const ShardData* shard = shard_data(full);
  return (shard ? shard->local : full).storage();
}

void State::before_forward(size_t group, Inputs in) {
  Group& g = groups_[group];
  check_unchanged(g);
  if (g.is_root) {
    order_.clear();
    for (Group& other : groups_)  // what a backward that ended early has left
      if (!other.is_root && !pinned_ && options_.reshard_after_forward) release(other);
    if (options_.precision.param)
      for (Tensor& t : in)
        if (t.defined() && is_floating(t.dtype())) t = cast(t, *options_.precision.param);
  }
  gather(g);
  for (Param& p : g.params)
    for (Tensor* slot : p.slots) *slot = p.full;
  if (std::ranges::find(order_, group) == order_.end()) order_.push_back(group);
  prefetch(group, +1);
}

// Sums, hooks and the sink were made for the parameters that were trained then.
void State::check_unchanged(const Group& g) const {
  for (const Param& p : g.params)
    TESSERA_CHECK(p.sharded.requires_grad() == (grad_meta(p.leaf) != nullptr),
                  "fully_shard: {} was {} after fully_shard; do that before", p.name,
                  p.sharded.requires_grad() ? "unfrozen" : "frozen");
}

void State::forward_failed(size_t group) {
  if (pinned_) return;
  put_sharded_into_slots(groups_[group]);
  release(groups_[group]);
}

void State::after_forward(size_t group, Tensor& out) {
  Group& g = groups_[group];
  if (g.is_root && options_.precision.output) out = cast(out, *options_.precision.output);
  if (pinned_) return;
  put_sharded_into_slots(g);
  bool needed = grad_enabled() && (g.is_root || !options_.reshard_after_forward);
  if (!needed) release(g);
  if (!g.is_root) return;
  last_order_ = order_;
  for (Group& other : groups_)  // what a changed order has gathered in vain
    if (!other.is_root && (options_.reshard_after_forward || !grad_enabled())) release(other);
}

void State::unshard() {
  NoGrad off;
  pinned_ = true;
  for (Group& g : groups_) {
    gather(g);
    for (Param& p : g.params)
      for (Tensor* slot : p.slots) *slot = p.full;
  }
}

void State::reshard() {
  pinned_ = false;
  for (Group& g : groups_) {
    put_sharded_into_slots(g);
    release(g);
  }
}

// ---- gradients

void State::set_sync(bool sync) {
  TESSERA_CHECK(sync || !options_.tree_accumulation,
                "fully_shard: tree accumulation sums micro-batches after they are reduced; leave "
                "sync on");
  sync_ = sync;
}

void State::deliver(int slot, Tensor grad) {
  NoGrad off;
  auto [group, param] = places_[size_t(slot)];
  Group& g = groups_[group];
  Param& p = g.params[param];
  if (!delivered_) {
    delivered_ = true;
    last_works_.clear();
    if (micro_batch_ > 0 && !p.sharded.grad().defined() && sync_) micro_batch_ = 0;
  }
  if (p.rest.defined()) grad = to_local(redistribute(grad, p.rest_layout));
  if (options_.precision.reduce) grad = cast(grad, *options_.precision.reduce);
  if (p.gradient.defined()) {
    p.gradient = add(std::move(p.gradient), std::move(grad));
  } else {
    // Those on their way make room for the ones that come.
    while (!on_their_way_.empty() && memory_.gradients + bytes_of(grad) > most_gradient_bytes_)
      settle_first();
    memory_.gradients += bytes_of(grad);
    memory_.gradients_peak = std::max(memory_.gradients_peak, memory_.gradients);
    p.gradient = std::move(grad);
  }
  if (++g.arrived == g.trainable) complete(g);
}

// All gradients of the group are there, so nothing reads its weights any more.
void State::complete(Group& g) {
  release(g);
  if (!sync_) return;
  for (Param& p : g.params)
    if (grad_meta(p.leaf)) reduce(p);
}

void State::reduce(Param& p) {
  const DeviceMesh& mesh = mesh_of(p.sharded);
  Tensor term = from_local(p.gradient, mesh, p.term, p.sharded.shape());
  p.reduced = redistribute(term, layout_of(p.sharded));
  note_work(shard_data(p.reduced)->local);
  on_their_way_.push_back(&p);
  sent_ = true;
}

void State::drop_gradient(Param& p) {
  if (p.gradient.defined()) memory_.gradients -= bytes_of(p.gradient);
  p.gradient = {};
}

// The reduction that was started first becomes part of the parameter's gradient.
void State::settle_first() {
  Param& p = *on_their_way_.front();
  on_their_way_.pop_front();
  Tensor piece = std::exchange(p.reduced, {});
  shard_data(piece)->local.storage()->wait_ready();
  drop_gradient(p);
  accumulate(p, cast(piece, p.sharded.dtype()));
}

// Without a tree: added to what is there. With one: the carry of a binary counter.
void State::accumulate(Param& p, Tensor piece) {
  Tensor previous = p.sharded.grad();
  if (!options_.tree_accumulation) {
    p.sharded.set_grad(previous.defined() ? add(previous, piece) : std::move(piece));
    return;
  }
  size_t level = 0;
  for (; micro_batch_ >> level & 1; ++level) piece = add(p.levels[level], piece);
  if (p.levels.size() <= level) p.levels.resize(level + 1);
  p.levels[level] = piece;
  // What is in no complete tree yet joins from the smallest up.
  Tensor total = piece;
  for (size_t up = level + 1; up < p.levels.size(); ++up)
    if ((micro_batch_ + 1) >> up & 1) total = add(p.levels[up], total);
  p.sharded.set_grad(total);
}

void State::name_unused(const Group& g) {
  std::string names;
  for (const Param& p : g.params)
    if (grad_meta(p.leaf) && !p.gradient.defined()) names += (names.empty() ? "" : ", ") + p.name;
  std::string why = fmt::format(
      "fully_shard: parameters got no gradient in this backward: {}; leave them out of the model "
      "or "
      "freeze them",
      names);
  abort(why);  // the other ranks wait in a reduction that this one will not join
  throw UserError(why);
}

// On every line that this rank is on: of the data-parallel axes and of those that stay.
void State::abort(const std::string& why) {
  const DeviceMesh mesh = mesh_of(groups_.back().params.back().sharded);
  for (int axis = 0; axis < mesh.ndim(); ++axis) mesh.group(axis)->abort(why);
}

void State::backward_finished() {
  NoGrad off;
  for (Group& g : groups_) {
    if (sync_ && g.arrived < g.trainable) {
      for (const Param& p : g.params)
        if (grad_meta(p.leaf) && !p.gradient.defined()) name_unused(g);
      complete(g);  // the rest came in earlier backwards, without sync
    }
    release(g);
    g.arrived = 0;
  }
  while (!on_their_way_.empty()) settle_first();
  last_works_ = std::exchange(works_, {});
  if (sync_) ++micro_batch_;
  delivered_ = sent_ = false;
}

void State::backward_abandoned() {
  if (sent_ && process_group().size() > 1)
    abort(
        "fully_shard: a backward failed after gradients were sent; the other ranks wait for the "
        "rest");
  for (Group& g : groups_) {
    for (Param& p : g.params) p.reduced = {}, drop_gradient(p);
    release(g);
    g.arrived = 0;
  }
  on_their_way_.clear();
  works_.clear();
  delivered_ = sent_ = false;
}

double State::communication_ms() {
  double total = 0;
  for (const Ref<Work>& w : last_works_) {
    w->wait();
    total += w->elapsed_ms();
  }
  return total;
}

}  // namespace

std::shared_ptr<Fsdp> fully_shard(nn::Module& model, const FsdpOptions& options) {
  auto state = std::make_shared<State>(model, options);
  state->attach(model);
  return state;
}

}  // namespace tessera::parallel
