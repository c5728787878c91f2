// Sets up fully_shard: sorts parameters into groups, replaces them by shards, adds hooks.
// Everything is checked before anything is changed.
#include "parallel/fsdp.h"

#include <algorithm>
#include <map>

#include "core/autograd/autograd.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/default_device.h"
#include "core/ops/create.h"
#include "core/tensor/memory_label.h"
#include "parallel/fsdp_state.h"
#include "parallel/path_pattern.h"
#include "parallel/tensor_parallel.h"

namespace tessera::parallel {
namespace fsdp {

using nn::Module;

int64_t bytes_of(const Tensor& t) { return int64_t(local_of(t).nbytes()); }

namespace {

bool has_number_for_name(const std::string& path) {
  std::string last = path.substr(path.rfind('.') + 1);
  return !last.empty() && std::ranges::all_of(last, [](char c) { return c >= '0' && c <= '9'; });
}

// The paths of the modules that form groups of their own; modules inside of them are left out.
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

}  // namespace

State::State(Module& model, const FsdpOptions& options) : options_(options) {
  if (!options_.mesh.defined())
    options_.mesh = init_device_mesh({{"dp", world().size()}}, world_group());
  TESSERA_CHECK(options_.mesh.ndim() <= 2,
                "fully_shard: a mesh of {} axes ({}); give one, or two of which the first "
                "replicates",
                options_.mesh.ndim(), options_.mesh.to_string());
  make_groups(model);
  for (Group& g : groups_)
    for (Param& p : g.params) plan(p);
  allocate_pieces();
  int64_t root_gradients = 0, group_gradients = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    int64_t gradients = 0;
    for (size_t i = 0; i < groups_[g].params.size(); ++i) {
      Param& p = groups_[g].params[i];
      shard(p, model);
      places_.emplace_back(g, i);
      if (p.trainable()) {
        ++groups_[g].trainable;
        gradients += bytes_of(p.leaf) / int64_t(size_of(p.leaf.dtype())) *
                     int64_t(size_of(options_.precision.reduce.value_or(p.leaf.dtype())));
      }
      groups_[g].whole_bytes += bytes_of(p.leaf);
      memory_.sharded += bytes_of(p.sharded);
    }
    memory_.largest_group = std::max(memory_.largest_group, groups_[g].whole_bytes);
    int64_t& most = groups_[g].is_root ? root_gradients : group_gradients;
    most = std::max(most, gradients);
  }
  for (size_t slot = 0; slot < places_.size(); ++slot) {
    const Param& p = param(int(slot));
    own_gradient(p.leaf, slot), own_gradient(p.sharded, slot + places_.size());
  }
  // The gradients of the model's own group arrive first and last; those of the others arrive group
  // by group.
  most_gradient_bytes_ = root_gradients + group_gradients;
  materialize(model);  // buffers; parameters have memory by now
}

State::~State() {
  for (Group& g : groups_)
    for (Param& p : g.params)
      for (const Tensor* t : {&p.leaf, &p.sharded})
        if (GradMeta* meta = grad_meta(*t); meta && meta->sink == this) meta->sink = nullptr;
}

void State::own_gradient(const Tensor& leaf, size_t slot) {
  if (GradMeta* meta = grad_meta(leaf)) meta->sink = this, meta->slot = int(slot);
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
    // Tied between groups: it belongs to the model's own.
    if (it->second.first != home) it->second.first.clear();
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
      p.sharded = *slots[0].tensor;  // until shard()
      for (nn::Slot& s : slots) p.slots.push_back(s.tensor);
      find_eight_bits(p, slots);
    }
    if (g.is_root || !g.params.empty()) groups_.push_back(std::move(g));
  }
}

// Determines the layouts of a parameter; throws where they are impossible.
void State::plan(Param& p) const {
  const DeviceMesh& dp = options_.mesh;
  const Tensor& old = p.sharded;
  int dim = options_.shard_dim ? options_.shard_dim(p.name, old) : 0;
  TESSERA_CHECK_AS(ShardingError, old.ndim() > 0 && dim >= 0 && dim < old.ndim(),
                   "fully_shard: parameter {} ({}) cannot be sharded by dim {}", p.name,
                   describe(old), dim);
  TESSERA_CHECK(!grad_meta(old) || !grad_meta(old)->sink,
                "fully_shard: the gradient of {} goes to another wrapper already (ddp or "
                "fully_shard); wrap a model once",
                p.name);
  p.device = old.device().is_meta() ? default_device() : old.device();
  TESSERA_CHECK(!options_.offload || !runtime_of(p.device).host_addressable(),
                "fully_shard: offload of {}, which is in memory of the host already ({}); leave "
                "offload out, or make the model on a device",
                p.name, to_string(p.device));
  p.cut = Layout(size_t(dp.ndim()), Replicate());
  p.cut.back() = Shard(dim);
  p.mesh = dp;
  Layout layout = p.cut;
  p.whole = Layout(size_t(dp.ndim()), Replicate());
  p.term = Layout(size_t(dp.ndim()), Partial(ReduceOp::kAvg));
  p.even = dim == 0 && local_of(old).size(0) % process_group().size() == 0;
  if (!old.is_sharded()) return;
  p.rest = mesh_of(old);
  p.rest_layout = layout_of(old);
  p.mesh = dp.joined(p.rest);
  for (const std::string& axis : p.rest.axes()) {
    TESSERA_CHECK(!dp.has_axis(axis),
                  "fully_shard: parameter {} is sharded over axis \"{}\" already", p.name, axis);
    TESSERA_CHECK(p.mesh.axis(axis) >= dp.ndim(),
                  "fully_shard: axis \"{}\", over which {} is sharded, must come after the "
                  "data-parallel axes of mesh ({})",
                  axis, p.name, p.mesh.to_string());
  }
  for (const Placement& r : p.rest_layout)
    layout.push_back(r), p.whole.push_back(r), p.term.push_back(r), p.even &= !r.is_shard(0);
  TESSERA_CHECK_AS(ShardingError, fits(old.shape(), layout, p.mesh.sizes()),
                   "fully_shard: parameter {} ({}) cannot be {} over mesh ({})", p.name,
                   describe(old), to_string(layout), p.mesh.to_string());
}

// Allocates memory for pieces where it is the process group's own. The first collective on cards
// decides whether there is such memory.
void State::allocate_pieces() {
  ProcessGroup& group = process_group();
  size_t bytes = 0;
  for (Group& g : groups_)
    for (Param& p : g.params) {
      if (p.even && card_.is_cpu()) card_ = p.device;
      p.even = p.even && !p.device.is_cpu() && p.device == card_;
      if (p.even) bytes += Parts::size_of_part(local_of(p.sharded).nbytes() / size_t(group.size()));
    }
  if (bytes == 0 || group.size() == 1) return;
  group.broadcast(zeros({1}, {kF32, card_}), 0);
  if (options_.offload || !group.has_own_memory(card_)) return;
  const MemoryLabel label(MemoryUse::kParameters, "pieces of fully_shard");
  Ref<Storage> block = group.allocate(bytes, card_);
  if (group.has_own_memory(card_)) pieces_.emplace(std::move(block));
}

// The piece in memory of the host from which the device copies; without values where it has none.
Tensor State::offloaded(const Param& p, const Tensor& piece) const {
  const Meta meta = Meta::contiguous(piece.shape(), piece.dtype(), kCPU);
  return piece.device().is_meta() ? empty_in(meta, runtime_of(p.device).host_allocator())
                                  : transferred(piece, kCPU);
}

// The piece in the process group's own memory.
Tensor State::at_home(Param& p, const Tensor& piece) {
  p.home = pieces_->next(piece.nbytes());
  const Tensor there(Meta::contiguous(piece.shape(), piece.dtype(), p.device), p.home);
  if (!piece.device().is_meta()) copy_values(there, piece);
  return there;
}

// Replaces the parameter by this rank's piece.
void State::shard(Param& p, Module& model) {
  Tensor old = p.sharded, whole = old.is_sharded() ? to_local(old.detach()) : old.detach();
  Tensor piece = to_local(distribute(whole, options_.mesh, p.cut));
  if (options_.offload)
    piece = offloaded(p, piece);
  else if (pieces_ && p.even)
    piece = at_home(p, piece);
  else if (piece.device().is_meta())
    piece = empty(piece.shape(), piece.dtype(), p.device);
  Layout layout = p.cut;
  layout.append(p.rest_layout.begin(), p.rest_layout.end());
  p.sharded = from_local(piece, p.mesh, layout, old.shape());
  // Code outside of here sees shape and history of the leaf that forward will use, not the cuts
  // along the data-parallel axes.
  DType t = options_.precision.param.value_or(old.dtype());
  Tensor shape_only(Meta::contiguous(whole.shape(), t, p.device), nullptr);
  p.leaf =
      p.rest.defined() ? from_local(shape_only, p.rest, p.rest_layout, old.shape()) : shape_only;
  if (old.requires_grad()) p.leaf.requires_grad_(), p.sharded.requires_grad_();
  model.replace(old, p.sharded);
}

void State::attach(Module& model) {
  auto self = shared_from_this();
  for (size_t g = 0; g < groups_.size(); ++g) {
    Module& m = model.submodule(groups_[g].path);
    // These hooks are outside of other wrappers' hooks, which therefore see whole weights.
    nn::HookHandle first =
        m.add_pre_hook([self, g](Module&, Inputs in) { self->before_forward(g, in); }, true);
    if (groups_[g].is_root) root_ = first;
    m.add_post_hook([self, g](Module&, Inputs, Tensor& out) { self->after_forward(g, out); });
    m.add_unwind_hook([self, g](Module&) { self->forward_failed(g); });
  }
  if (!options_.sync_buffers) return;
  std::vector<Ref<ProcessGroup>> groups;  // along the axis that cuts first
  for (int axis = options_.mesh.ndim(); axis-- > 0;) groups.push_back(options_.mesh.group(axis));
  statistics_ =
      RunningStatistics::attach(model, std::move(groups), false, [this] { return sync(); });
}

}  // namespace fsdp

std::shared_ptr<Fsdp> fully_shard(nn::Module& model, const FsdpOptions& options) {
  auto state = std::make_shared<fsdp::State>(model, options);
  state->attach(model);
  return state;
}

}  // namespace tessera::parallel
