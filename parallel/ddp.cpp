#include "parallel/ddp.h"

#include <algorithm>
#include <utility>

#include "collectives/ops.h"
#include "collectives/together.h"
#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/tensor/memory_label.h"

namespace tessera::parallel {
namespace {

size_t aligned(size_t bytes) { return (bytes + 63) & ~size_t(63); }

// Groups parameters of one dtype, in order, into buckets of limited size.
std::vector<std::vector<int>> cut_buckets(const std::vector<NamedTensor>& parameters,
                                          const std::vector<int>& order, size_t first, size_t cap) {
  std::vector<std::vector<int>> buckets;
  size_t bytes = 0;
  for (int slot : order) {
    const Tensor& p = parameters[size_t(slot)].tensor;
    size_t limit = buckets.size() <= 1 ? first : cap;
    bool same_type = !buckets.empty() &&
                     parameters[size_t(buckets.back()[0])].tensor.dtype() == p.dtype() &&
                     parameters[size_t(buckets.back()[0])].tensor.device() == p.device();
    if (!same_type || bytes + p.nbytes() > limit) buckets.emplace_back(), bytes = 0;
    buckets.back().push_back(slot);
    bytes += aligned(p.nbytes());
  }
  return buckets;
}

// Copies a gradient into its bucket, unless backward has written it there.
void copy_into_bucket(const Tensor& view, const Tensor& grad) {
  if (!grad.is_same(view)) assign_(view, grad);
}

}  // namespace

Reducer::Reducer(std::vector<NamedTensor> parameters, const DdpOptions& options)
    : parameters_(std::move(parameters)),
      options_(options),
      group_(options.group ? options.group : world_group()) {
  if (options_.bucket_bytes == 0) options_.bucket_bytes = kCpuBucketBytes;
  if (options_.first_bucket_bytes == 0) options_.first_bucket_bytes = options_.bucket_bytes;
  std::vector<int> order;
  for (size_t i = parameters_.size(); i-- > 0;)
    order.push_back(int(i));  // backward reaches the last parameters first
  build(order);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    GradMeta* meta = grad_meta(parameters_[i].tensor);
    TESSERA_CHECK(!meta->sink, "ddp: parameter {} already belongs to a reducer",
                  parameters_[i].name);
    meta->sink = this;
    meta->slot = int(i);
  }
}

Reducer::~Reducer() {
  for (const NamedTensor& p : parameters_)
    if (GradMeta* meta = grad_meta(p.tensor); meta && meta->sink == this) meta->sink = nullptr;
}

void Reducer::build(const std::vector<int>& order) {
  buckets_.clear();
  place_.assign(parameters_.size(), {});
  seen_.assign(parameters_.size(), false);
  used_.assign(parameters_.size(), false);
  for (auto& slots :
       cut_buckets(parameters_, order, options_.first_bucket_bytes, options_.bucket_bytes)) {
    Bucket b;
    const DType t = parameters_[size_t(slots[0])].tensor.dtype();
    const Device device = parameters_[size_t(slots[0])].tensor.device();
    size_t bytes = 0;
    for (int s : slots) bytes += aligned(parameters_[size_t(s)].tensor.nbytes());
    MemoryLabel label(MemoryUse::kGradients, "buckets of ddp");
    Ref<Storage> storage = group_->allocate(bytes, device);
    b.flat = Tensor(Meta::contiguous({int64_t(bytes / size_of(t))}, t, device), storage);
    zero_(b.flat);  // padding takes part in the reduction
    int64_t at = 0;
    for (int s : slots) {
      const Tensor& p = parameters_[size_t(s)].tensor;
      place_[size_t(s)] = {int(buckets_.size()),
                           Tensor(Meta::contiguous(p.shape(), t, device), storage, at)};
      at += int64_t(aligned(p.nbytes()) / size_of(t));
    }
    b.slots = std::move(slots);
    b.owners = b.flat.storage()->use_count() - 1;  // without `storage`
    buckets_.push_back(std::move(b));
  }
}

// If the parameter still has a gradient (no zero_grad since), adds to it, as would happen without
// ddp: it is the same on every rank, so averaging leaves it as it is. A rebuilt bucket takes it
// over.
void Reducer::put(int slot, const Tensor& grad) {
  const NamedTensor& p = parameters_[size_t(slot)];
  const Tensor &view = place_[size_t(slot)].second, previous = p.tensor.grad();
  if (options_.tree_accumulation) {
    TESSERA_CHECK(micro_batch_ > 0 || !previous.defined(),
                  "ddp: {} still has the gradient of the last step; call zero_grad before the next",
                  p.name);
    return copy_into_bucket(view, grad);
  }
  if (!previous.defined()) return copy_into_bucket(view, grad);
  if (previous.storage() == view.storage()) return add_(view, grad);
  assign_(view, previous + grad);
}

Tensor Reducer::grad_buffer(int slot) {
  const auto& [index, view] = place_[size_t(slot)];
  const Bucket& bucket = buckets_[size_t(index)];
  const bool added =
      !options_.tree_accumulation && parameters_[size_t(slot)].tensor.grad().defined();
  // A recorder holds everything it has seen, so reference counts tell nothing then.
  const bool kept = !context().backend && (view.ref()->use_count() > 1 ||
                                           bucket.flat.storage()->use_count() > bucket.owners);
  return added || kept ? Tensor() : view;
}

void Reducer::deliver(int slot, Tensor grad) {
  NoGrad off;
  auto& [index, view] = place_[size_t(slot)];
  Bucket& bucket = buckets_[size_t(index)];
  TESSERA_CHECK(!seen_[size_t(slot)],
                "ddp: parameter {} got two gradients in one backward, one of them of a backward "
                "that ran inside of the other; use recompute() for such a part of the model",
                parameters_[size_t(slot)].name);
  seen_[size_t(slot)] = used_[size_t(slot)] = true;
  if (!rebuilt_ && sync()) ready_order_.push_back(slot);
  put(slot, std::move(grad));
  if (++bucket.arrived == bucket.slots.size()) {
    complete(bucket);
    if (sync()) launch_ready();
  }
}

// Adds up micro-batches in a balanced tree, as carries propagate in a binary counter: level i holds
// the sum of 2^i micro-batches if bit i of the count is set.
void Reducer::complete(Bucket& bucket) {
  if (!options_.tree_accumulation) return;
  if (micro_batch_ == 0 && sync()) return;
  size_t level = 0;
  for (; micro_batch_ >> level & 1; ++level)
    assign({&bucket.flat, 1}, pointwise_primitive("add"),
           operands(std::exchange(bucket.levels[level], {}), Tensor(bucket.flat)));
  if (sync()) {
    TESSERA_CHECK(((micro_batch_ + 1) & micro_batch_) == 0,
                  "ddp: tree accumulation of {} micro-batches; their number must be a power of two",
                  micro_batch_ + 1);
    return;
  }
  if (bucket.levels.size() <= level) bucket.levels.resize(level + 1);
  bucket.levels[level] = clone(bucket.flat);
}

void Reducer::launch_ready() {
  for (; next_launch_ < buckets_.size() &&
         buckets_[next_launch_].arrived == buckets_[next_launch_].slots.size();
       ++next_launch_) {
    Bucket& b = buckets_[next_launch_];
    if (&b == &buckets_[0]) time_.count();
    if (group_->size() == 1) continue;
    all_reduce_(b.flat, group_, ReduceOp::kAvg);
    time_.add(b.flat);
  }
}

void Reducer::name_unused() {
  std::string names;
  int count = 0;
  for (size_t i = 0; i < used_.size(); ++i)
    if (!used_[i] && ++count <= 8) names += (count > 1 ? ", " : "") + parameters_[i].name;
  throw UserError(fmt::format(
      "ddp: {} parameters got no gradient in this backward ({}{}); leave them out of the model, "
      "freeze them, or set allow_unused",
      count, names, count > 8 ? ", .." : ""));
}

// All gradients were cleared in the middle of an accumulation: the step begins anew.
void Reducer::cleared(int) {
  auto has_grad = [](const NamedTensor& p) { return p.tensor.grad().defined(); };
  if (std::ranges::any_of(parameters_, has_grad)) return;
  if (on_cleared_) on_cleared_();
  if (micro_batch_ == 0) return;
  micro_batch_ = 0;
  used_.assign(used_.size(), false);
  for (Bucket& b : buckets_) b.levels.clear();
}

// Resets the state of a backward: no gradient has arrived.
void Reducer::start_over() {
  seen_.assign(seen_.size(), false);
  for (Bucket& b : buckets_) b.arrived = 0;
  next_launch_ = 0;
}

// The other ranks wait in reductions that this one will not join. If it went on, the gradients of
// its next step would be added to those of their last.
void Reducer::backward_abandoned(const std::string& why) {
  if (sync() && group_->size() > 1)
    group_->abort(fmt::format("ddp: a backward failed when {} of {} buckets were sent: {}",
                              next_launch_, buckets_.size(), why));
  if (!rebuilt_) ready_order_.clear();
  start_over();
}

void Reducer::backward_finished() {
  NoGrad off;
  for (size_t slot = 0; slot < seen_.size(); ++slot) {
    if (seen_[slot]) continue;
    if (sync() && !used_[slot] && !options_.allow_unused) name_unused();
    auto& [index, view] = place_[slot];
    Tensor previous = parameters_[slot].tensor.grad();
    if (!previous.defined() || options_.tree_accumulation)
      zero_(view);
    else if (!(previous.storage() == view.storage()))
      assign_(view, previous);
    Bucket& b = buckets_[size_t(index)];
    if (++b.arrived == b.slots.size()) complete(b);
  }
  if (sync()) launch_ready();
  for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].tensor.set_grad(place_[i].second);
  start_over();
  micro_batch_ = sync() ? 0 : micro_batch_ + 1;
  if (sync()) used_.assign(used_.size(), false);
  if (sync() && !rebuilt_) rebuild_in_ready_order();
}

// Rebuilds the buckets on every rank in the order in which rank 0's gradients became ready. The
// gradients of this step stay in the old buckets, which live as long as they are read. This happens
// once, so it is no part of a step that is traced.
void Reducer::rebuild_in_ready_order() {
  rebuilt_ = true;
  if (!options_.rebuild || group_->size() == 1) return;
  EagerScope untraced;
  std::vector<bool> listed(parameters_.size(), false);
  for (int slot : ready_order_) listed[size_t(slot)] = true;
  // Parameters that this rank did not reach: all ranks must reduce them.
  for (size_t i = 0; i < listed.size(); ++i)
    if (!listed[i]) ready_order_.push_back(int(i));
  std::vector<int64_t> order(ready_order_.begin(), ready_order_.end());
  Tensor t = from_values<int64_t>(order, {int64_t(order.size())});
  group_->broadcast(t, 0);
  build(std::vector<int>(t.values<int64_t>(), t.values<int64_t>() + t.numel()));
}

std::unique_ptr<Reducer> make_reducer(nn::Module& model, const DdpOptions& options) {
  Ref<ProcessGroup> group = options.group ? options.group : world_group();
  for (const NamedTensor& t : model.state())
    TESSERA_CHECK(
        !t.tensor.is_sharded(),
        "ddp: {} is {}; replicate sharded models with fully_shard over a mesh whose first "
        "axis replicates",
        t.name, describe(t.tensor));
  if (group->size() > 1) {
    const TogetherScope together;
    for (const NamedTensor& t : model.state()) broadcast_(t.tensor.detach(), group, 0);
  }
  DdpOptions o = options;
  o.group = group;
  return std::make_unique<Reducer>(model.trainable_parameters(), o);
}

Ddp::Ddp(nn::Module& model, const DdpOptions& options) : reducer_(make_reducer(model, options)) {
  if (options.sync_buffers)
    statistics_ = RunningStatistics::attach(model, {Ref<ProcessGroup>(&group())}, true,
                                            [this] { return sync(); });
  if (statistics_) reducer_->on_cleared([statistics = statistics_] { statistics->start_over(); });
}

std::shared_ptr<Ddp> ddp(nn::Module& model, const DdpOptions& options) {
  auto attached = std::make_shared<Ddp>(model, options);
  model.keep_alive(attached);
  return attached;
}

double count_weight(ProcessGroup& group, int64_t count) {
  Tensor total = from_values<double>({double(count)}, {1});
  group.all_reduce(total);
  double sum = total.item<double>();
  return sum > 0 ? double(count) * group.size() / sum : 0;
}

}  // namespace tessera::parallel
