#include "parallel/sync_batch_norm.h"

#include <set>

#include "collectives/ops.h"
#include "core/autograd/autograd.h"
#include "core/ops/batch_norm_stats.h"
#include "core/ops/compose.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "core/tensor/wrapped.h"
#include "dtensor/dtensor.h"

namespace tessera::nn {
namespace {

int64_t values_a_channel(const Tensor& x) { return x.numel() / x.size(1); }

// The moments over the batches of all ranks, in f64.
struct GroupMoments {
  ChannelMoments of;
  Tensor count;
};

// Combines the counts, means and variances of ranks by the pairwise formula of Chan, Golub and
// LeVeque, 1979: no square of a mean is subtracted, so a large mean costs no digits.
GroupMoments moments_over(const Tensor& x, const Ref<ProcessGroup>& group) {
  const ChannelMoments mine = batch_norm_stats(x);
  const int64_t ranks = group->size(), channels = x.size(1);
  Tensor parts[] = {full({1}, double(values_a_channel(x)), {kF64, x.device()}),
                    cast(mine.mean, kF64), cast(mine.var, kF64)};
  const Tensor all = reshape(all_gather(cat(parts), group), {ranks, 1 + 2 * channels});
  const Tensor counts = narrow(all, 1, 0, 1), means = narrow(all, 1, 1, channels),
               vars = narrow(all, 1, 1 + channels, channels);
  const Tensor count = sum(counts), share = counts / clamp_min(count, 1);
  const Tensor mean = sum(means * share, {0});
  return {{mean, sum((vars + square(means - mean)) * share, {0})}, count};
}

// Computes y, mean, var and count from x, weight, bias and residual; the last three may be
// undefined.
class NormOverRanks final : public CustomFunction {
 public:
  struct Operands {
    bool weight = false, bias = false, residual = false;
  };
  NormOverRanks(Ref<ProcessGroup> group, double eps, Operands has, bool relu)
      : group_(std::move(group)), eps_(eps), has_(has), relu_(relu) {}
  std::string_view name() const override { return "sync_batch_norm"; }

  Tensors forward(std::span<const Tensor> in) override {
    const Tensor& x = in[0];
    size_t next = 1;
    auto operand = [&](bool has) { return has ? in[next++] : Tensor(); };
    const Tensor weight = operand(has_.weight), bias = operand(has_.bias),
                 residual = operand(has_.residual);
    GroupMoments all = moments_over(x, group_);
    // The count is read only where this rank has at most one value a channel, so that there may be
    // a single value on all ranks together.
    if (values_a_channel(x) <= 1)
      TESSERA_CHECK_AS(ShapeError, all.count.item<double>() > 1,
                       "sync_batch_norm: {:g} values a channel on all ranks, x {} here; training "
                       "takes more than one",
                       all.count.item<double>(), to_string(x.shape()));
    const DType t = batch_norm_type(x);
    const ChannelMoments of{cast(all.of.mean, t), cast(all.of.var, t)};
    const Tensor y =
        batch_norm_apply(x, of, weight, bias, eps_, {.residual = residual, .relu = relu_});
    for (const Tensor* s : {&x, &of.mean, &of.var}) save(*s);
    save(all.count);
    if (weight.defined()) save(weight);
    if (relu_) save(y);
    return {y, of.mean, of.var, all.count};
  }

  Tensors vjp(std::span<const Tensor> saved, std::span<const Tensor> cot) override {
    for (size_t i = 1; i < cot.size(); ++i)
      TESSERA_CHECK(!cot[i].defined(), "sync_batch_norm: not differentiable through statistics");
    const Tensor &x = saved[0], weight = has_.weight ? saved[4] : Tensor(),
                 y = relu_ ? saved.back() : Tensor();
    const ChannelMoments of{saved[1], saved[2]};
    const Tensor g = cast(cot[0], x.dtype());
    const ChannelSums mine = batch_norm_grad_stats(g, x, of.mean, y);
    Tensor parts[] = {cast(mine.g, kF64), cast(mine.gx, kF64)};
    const Tensor mean = all_reduce(cat(parts), group_) / clamp_min(saved[3], 1);
    const int64_t channels = x.size(1);
    const DType t = of.mean.dtype();
    const BatchNormGrads d = batch_norm_grad_apply(
        g, x, of,
        {cast(narrow(mean, 0, 0, channels), t), cast(narrow(mean, 0, channels, channels), t)},
        weight, eps_, y, has_.residual);
    Tensors grads{d.x};
    if (has_.weight) grads.push_back(mine.gx * rsqrt(of.var + eps_));
    if (has_.bias) grads.push_back(mine.g);
    if (has_.residual) grads.push_back(d.residual);
    return grads;
  }

 private:
  static DType batch_norm_type(const Tensor& x) { return x.dtype() == kF64 ? kF64 : kF32; }
  const Ref<ProcessGroup> group_;
  const double eps_;
  const Operands has_;
  const bool relu_;
};

SharedMoments moments_of_plain(const Ref<ProcessGroup>& group, const Tensor& x,
                               const Tensor& weight, const Tensor& bias, double eps,
                               const NormThen& then) {
  // A residual that is promoted or broadcast is added as `+` does it.
  const bool apart = then.residual.defined() &&
                     !(then.residual.dtype() == x.dtype() && then.residual.shape() == x.shape());
  const bool residual = then.residual.defined() && !apart;
  Tensors in{x};
  const DType wide = x.dtype() == kF64 ? kF64 : kF32;
  if (weight.defined()) in.push_back(cast(weight, wide));
  if (bias.defined()) in.push_back(cast(bias, wide));
  if (residual) in.push_back(then.residual);
  Tensors out = apply_function(
      make_ref<NormOverRanks>(group, eps,
                              NormOverRanks::Operands{weight.defined(), bias.defined(), residual},
                              then.relu && !apart),
      in);
  if (apart) out[0] = then(std::move(out[0]));
  return {{out[0], out[1].detach(), out[2].detach()}, out[3].detach()};
}

// The moments of x, whose channels are whole or cut over ranks outside of the group: each rank of
// the group has the same channels of its part of the batch.
SharedMoments moments_of_channels(const Ref<ProcessGroup>& group, const Tensor& x,
                                  const Tensor& weight, const Tensor& bias, double eps,
                                  const NormThen& then) {
  const DeviceMesh& mesh = mesh_of(x);
  const Layout of_x = layout_of(x);
  Layout of_channel;
  for (const Placement& p : of_x) of_channel.push_back(p.is_shard() ? Shard(0, p.unit) : p);
  auto piece = [](const Tensor& t, const Layout& l) {
    return t.defined() ? to_local(redistribute(t, l)) : t;
  };
  SharedMoments mine =
      moments_of_plain(group, to_local(x), piece(weight, of_channel), piece(bias, of_channel), eps,
                       {.residual = piece(then.residual, of_x), .relu = then.relu});
  auto whole = [&](const Tensor& t, const Layout& l, const Shape& shape) {
    return from_local(t, mesh, l, shape);
  };
  const Shape channels{x.size(1)};
  return {{whole(mine.now.y, of_x, x.shape()), whole(mine.now.mean, of_channel, channels),
           whole(mine.now.var, of_channel, channels)},
          whole(mine.count, Layout(of_x.size(), Replicate()), {})};
}

bool only_channels_are_cut(const Tensor& x, const ProcessGroup& group) {
  const DeviceMesh& mesh = mesh_of(x);
  std::set<int> sharing;
  for (int r = 0; r < group.size(); ++r) sharing.insert(group.global_rank(r));
  for (int a = 0; a < mesh.ndim(); ++a) {
    const Placement& p = layout_of(x)[size_t(a)];
    if (!p.is_replicate() && !p.is_shard(1)) return false;
    const ProcessGroup& axis = *mesh.group(a);
    for (int r = 0; r < axis.size(); ++r)
      if (r != axis.rank() && sharing.contains(axis.global_rank(r))) return false;
  }
  return true;
}

MomentsSource moments_of(Ref<ProcessGroup> group) {
  return [group = std::move(group)](const Tensor& x, const Tensor& weight, const Tensor& bias,
                                    double eps, const NormThen& then) {
    if (!innermost(x).is_sharded()) return moments_of_plain(group, x, weight, bias, eps, then);
    TESSERA_CHECK_AS(ShardingError, x.is_sharded() && only_channels_are_cut(x, *group),
                     "sync_batch_norm: x is {}; it takes each rank's part of the batch, "
                     "to_local(x), of which only channels may be cut, and over other ranks than "
                     "those that share statistics",
                     describe(x));
    return moments_of_channels(group, x, weight, bias, eps, then);
  };
}

Ref<ProcessGroup> or_world(Ref<ProcessGroup> group) {
  return group ? std::move(group) : Ref<ProcessGroup>(&world());
}

}  // namespace

SyncBatchNorm::SyncBatchNorm(const BatchNormOptions& o, Ref<ProcessGroup> group)
    : BatchNormNd(2, kMaxDims, o) {
  if (group->size() > 1) share_moments(moments_of(std::move(group)));
}

std::shared_ptr<SyncBatchNorm> sync_batch_norm(const BatchNormOptions& options,
                                               Ref<ProcessGroup> group) {
  return std::make_shared<SyncBatchNorm>(options, or_world(std::move(group)));
}

void convert_sync_batch_norm(Module& module, Ref<ProcessGroup> group) {
  group = or_world(std::move(group));
  bool any = false;
  module.apply([&](Module& m) {
    auto* norm = dynamic_cast<BatchNormNd*>(&m);
    if (!norm) return;
    any = true;
    norm->share_moments(group->size() > 1 ? moments_of(group) : MomentsSource());
  });
  TESSERA_CHECK(any, "convert_sync_batch_norm: {} has no batch-norm", module.type_name());
}

}  // namespace tessera::nn
