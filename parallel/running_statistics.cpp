#include "parallel/running_statistics.h"

#include <algorithm>
#include <span>

#include "collectives/ops.h"
#include "core/autograd/autograd.h"
#include "core/nn/fp8.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "dtensor/dtensor.h"

namespace tessera::parallel {
namespace {

Tensor tree_sum(std::span<const Tensor> t) {
  if (t.size() == 1) return t[0];
  const size_t half = (t.size() + 1) / 2;
  return tree_sum(t.first(half)) + tree_sum(t.subspan(half));
}

}  // namespace

RunningStatistics::RunningStatistics(nn::Module& model, std::vector<Ref<ProcessGroup>> groups,
                                     bool accumulate_first)
    : groups_(std::move(groups)), accumulate_first_(accumulate_first) {
  for (const Ref<ProcessGroup>& group : groups_) ranks_ *= group->size();
  std::vector<const TensorImpl*> seen;  // a tied buffer is one
  for (const nn::Slot& s : model.slots()) {
    if (!s.is_buffer || !s.persistent || std::ranges::count(seen, s.tensor->impl())) continue;
    if (nn::is_fp8_history(s.name)) continue;  // no forward writes it
    seen.push_back(s.tensor->impl());
    if (is_differentiable(s.tensor->dtype()))
      means_.push_back({.slot = s.tensor});
    else
      counts_.push_back(s.tensor);
  }
}

std::shared_ptr<RunningStatistics> RunningStatistics::attach(nn::Module& model,
                                                             std::vector<Ref<ProcessGroup>> groups,
                                                             bool accumulate_first,
                                                             std::function<bool()> last) {
  auto self = std::make_shared<RunningStatistics>(model, std::move(groups), accumulate_first);
  if (self->means_.empty()) return nullptr;
  // When backward computes a forward again, the buffers were already written in the first run.
  auto idle = [](const nn::Module& m) { return !m.training() || recomputation::running_again(); };
  model.add_pre_hook([=](nn::Module& m, Inputs) {
    if (!idle(m)) self->before_forward(last());
  });
  model.add_post_hook([=](nn::Module& m, Inputs, Tensor&) {
    if (!idle(m)) self->after_forward(last());
  });
  model.add_unwind_hook([=](nn::Module& m) {
    if (!idle(m)) self->start_over();
  });
  return self;
}

void RunningStatistics::start_over() {
  made_.clear(), counts_start_.clear();
  start_ = Tensor();
}

Tensor RunningStatistics::packed() const {
  std::vector<Tensor> flat;
  for (const Buffer& b : means_) {
    const Tensor& t = local_of(*b.slot);
    flat.push_back(reshape(t, {t.numel()}));
  }
  return cat(flat);
}

void RunningStatistics::unpack(const Tensor& values) {
  int64_t at = 0;
  for (const Buffer& b : means_) {
    const Tensor& t = local_of(*b.slot);
    // A buffer that the forward did not write is left alone: averaging would round it.
    if (b.written) assign_(t, reshape(narrow(values, 0, at, t.numel()), t.shape()));
    at += t.numel();
  }
}

Tensor RunningStatistics::reduced(Tensor sum) const {
  for (const Ref<ProcessGroup>& group : groups_)
    if (group->size() > 1) sum = all_reduce(sum, group);
  return sum;
}

void RunningStatistics::before_forward(bool last) {
  if (means_.empty()) return;
  NoGrad off;
  // If a buffer was loaded or otherwise written since, its values belong to another step.
  auto changed = [](const Buffer& b) {
    return local_of(*b.slot).storage()->version() != b.made_version;
  };
  if (!made_.empty() && std::ranges::any_of(means_, changed)) start_over();
  if (!made_.empty()) {
    unpack(start_);
    for (size_t i = 0; i < counts_.size(); ++i) assign_(local_of(*counts_[i]), counts_start_[i]);
    return;
  }
  for (Buffer& b : means_) b.version = local_of(*b.slot).storage()->version();
  if (last) return;
  start_ = packed();
  counts_start_.clear();
  for (const Tensor* t : counts_) counts_start_.push_back(local_of(*t).clone());
}

void RunningStatistics::after_forward(bool last) {
  if (means_.empty()) return;
  if (made_.empty()) {
    if (last && ranks_ == 1) return;
    for (Buffer& b : means_) b.written = local_of(*b.slot).storage()->version() != b.version;
    if (last && std::ranges::none_of(means_, &Buffer::written)) return;
  }
  NoGrad off;
  made_.push_back(packed());
  for (Buffer& b : means_) b.made_version = local_of(*b.slot).storage()->version();
  if (!last) return;
  std::vector<Tensor> made = std::move(made_);
  start_over();  // a compiled step must leave nothing behind
  const double count = double(made.size() * size_t(ranks_));
  if (!accumulate_first_)
    for (Tensor& t : made) t = reduced(t);
  Tensor sum = tree_sum(made);
  if (accumulate_first_) sum = reduced(sum);
  unpack(sum * (1.0 / count));
}

void RunningStatistics::before(size_t k, size_t count) {
  if (k == 0) start_over();  // the step before may have failed
  before_forward(k + 1 == count);
}
void RunningStatistics::after(size_t k, size_t count) { after_forward(k + 1 == count); }

}  // namespace tessera::parallel
