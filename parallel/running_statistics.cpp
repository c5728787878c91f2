#include "parallel/running_statistics.h"

#include <span>

#include "collectives/ops.h"
#include "core/autograd/autograd.h"
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

RunningStatistics::RunningStatistics(nn::Module& model, Ref<ProcessGroup> group,
                                     bool accumulate_first)
    : group_(std::move(group)), accumulate_first_(accumulate_first) {
  for (const NamedTensor& b : model.named_buffers()) {
    const ShardData* cut = shard_data(b.tensor);
    (is_floating(b.tensor.dtype()) ? means_ : counts_).push_back(cut ? cut->local : b.tensor);
  }
  for (const Tensor& t : means_)
    TESSERA_CHECK(t.dtype() == means_[0].dtype(),
                  "running statistics: buffers of {} and of {}; expected one dtype",
                  describe(means_[0]), describe(t));
}

Tensor RunningStatistics::packed() const {
  std::vector<Tensor> flat;
  for (const Tensor& t : means_) flat.push_back(reshape(t, {t.numel()}));
  return cat(flat);
}

void RunningStatistics::unpack(const Tensor& values) {
  int64_t at = 0;
  for (const Tensor& t : means_) {
    assign_(t, reshape(narrow(values, 0, at, t.numel()), t.shape()));
    at += t.numel();
  }
}

void RunningStatistics::before(size_t k, size_t count) {
  if (idle(count) || count == 1) return;
  NoGrad off;
  if (k == 0) {
    start_ = packed();
    counts_start_.clear();
    for (const Tensor& t : counts_) counts_start_.push_back(t.clone());
    return;
  }
  unpack(start_);
  for (size_t i = 0; i < counts_.size(); ++i) assign_(counts_[i], counts_start_[i]);
}

void RunningStatistics::after(size_t k, size_t count) {
  if (idle(count)) return;
  NoGrad off;
  if (k == 0) made_.clear();  // of a step that failed
  made_.push_back(packed());
  if (k + 1 < count) return;
  std::vector<Tensor> made = std::move(made_);
  made_.clear(), counts_start_.clear();
  start_ = Tensor();  // nothing outlives the step, or it could not be compiled
  if (!accumulate_first_ && group_->size() > 1)
    for (Tensor& t : made) t = all_reduce(t, group_);
  Tensor sum = tree_sum(made);
  if (accumulate_first_ && group_->size() > 1) sum = all_reduce(sum, group_);
  unpack(sum * (1.0 / double(count * size_t(group_->size()))));
}

}  // namespace tessera::parallel
