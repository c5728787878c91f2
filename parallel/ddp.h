// Distributed data parallelism: parameters are replicated, each rank runs its part of the batch,
// gradients are averaged in buckets while backward still runs. Li et al., "PyTorch Distributed",
// VLDB 2020. Invariants: buckets are reduced in the same order on every rank; a gradient that is
// read waits for its bucket, so a program needs no call between backward and optimizer; sums have a
// fixed order.
#pragma once
#include <functional>
#include <memory>

#include "collectives/process_group.h"
#include "core/autograd/graph.h"
#include "core/dispatch/tracked_setting.h"
#include "core/nn/module.h"
#include "parallel/communication_time.h"
#include "parallel/data_parallel.h"

namespace tessera::parallel {

struct DdpOptions {
  Ref<ProcessGroup> group = {};   // null: the world
  size_t bucket_bytes = 0;        // 0: what measures best on the device (CPU: kCpuBucketBytes)
  size_t first_bucket_bytes = 0;  // of the first, which should leave early; 0: as bucket_bytes
  // Parameters without a gradient count as zero; else they are named in an error.
  bool allow_unused = false;
  bool rebuild = true;  // order buckets as gradients became ready, after the first step
  // Sum micro-batches in a balanced tree rather than one after the other, so that K micro-batches
  // on each of R ranks give the bits of any other K and R with the same product (powers of two).
  // Takes log2(K) more gradient buffers.
  bool tree_accumulation = false;
  // Persistent float buffers that a training forward writes become the mean of what all ranks made
  // of them (running_statistics.h). Off: each rank keeps its own.
  bool sync_buffers = true;
};
inline constexpr size_t kCpuBucketBytes = size_t(2) << 20;

/// Sums gradients over micro-batches and ranks. Ddp owns one; it is the sink of every trainable
/// parameter.
class Reducer final : public GradSink {
 public:
  Reducer(std::vector<NamedTensor> parameters, const DdpOptions& options);
  ~Reducer() override;
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  void deliver(int slot, Tensor grad) override;
  /// The view of its bucket, unless a gradient of earlier backwards is still to be added to, or
  /// somebody else holds it, whom this backward may have to read it for.
  Tensor grad_buffer(int slot) override;
  void backward_finished() override;
  /// Forgets what this backward delivered, so that it can be taken again, where no other rank waits
  /// for it: on one rank, or with sync off. Else the group is aborted with the reason. What it has
  /// added to gradients of earlier micro-batches stays, as without ddp: the step then begins anew,
  /// with zero_grad.
  void backward_abandoned(const std::string& why) override;
  void cleared(int slot) override;
  /// Calls `f` when a gradient is cleared and no parameter has one: the step begins anew.
  void on_cleared(std::function<void()> f) { on_cleared_ = std::move(f); }
  /// Gradients of the next backwards stay on this rank and accumulate.
  void set_sync(bool sync) { sync_.write(sync); }
  bool sync() const { return sync_.read() != 0; }
  ProcessGroup& group() const { return *group_; }
  /// How long reductions were executing since this was last asked, waiting for peers included; 0
  /// with one rank. Waits for them.
  double communication_ms() { return time_.take_ms(); }

 private:
  struct Bucket {
    std::vector<int> slots;
    Tensor flat;                 // what is reduced; grads are views of it
    std::vector<Tensor> levels;  // of the accumulation tree
    size_t arrived = 0;
    uint32_t owners = 0;  // of the memory: `flat` and its views in place_
  };
  void build(const std::vector<int>& order);
  void put(int slot, const Tensor& grad);
  void complete(Bucket& bucket);
  void launch_ready();
  void name_unused();
  void start_over();
  void rebuild_in_ready_order();

  std::vector<NamedTensor> parameters_;
  DdpOptions options_;
  Ref<ProcessGroup> group_;
  std::vector<Bucket> buckets_;
  std::vector<std::pair<int, Tensor>> place_;  // of each slot: bucket, view of its flat
  std::vector<bool> seen_, used_;              // in this backward; since the last reduction
  std::vector<int> ready_order_;
  size_t next_launch_ = 0;
  int64_t micro_batch_ = 0;  // since the last reduction
  CommunicationTime time_;   // of reductions
  std::function<void()> on_cleared_;
  TrackedSetting sync_{true};
  bool rebuilt_ = false;
};

/// Broadcasts parameters and persistent buffers of rank 0 and makes the reducer of a model's
/// trainable parameters; gradients are reduced for as long as it lives.
[[nodiscard]] std::unique_ptr<Reducer> make_reducer(nn::Module& model, const DdpOptions& options);

/// What ddp attached to a model. The model keeps it alive.
class Ddp final : public DataParallel {
 public:
  Ddp(nn::Module& model, const DdpOptions& options);
  void set_sync(bool sync) override { reducer_->set_sync(sync); }
  bool sync() const override { return reducer_->sync(); }
  double communication_ms() override { return reducer_->communication_ms(); }
  Reducer& reducer() { return *reducer_; }
  ProcessGroup& group() const { return reducer_->group(); }

 private:
  std::unique_ptr<Reducer> reducer_;
};

/// Makes `model` data-parallel from now on: broadcasts rank 0's parameters and persistent buffers
/// once, reduces gradients, and makes running statistics one set of values after each training
/// forward (DdpOptions::sync_buffers). The program goes on with the model itself; what is returned
/// is for no_sync and reports. Throws UserError for a model that is wrapped already, or sharded.
std::shared_ptr<Ddp> ddp(nn::Module& model, const DdpOptions& options = {});
template <class M>
std::shared_ptr<Ddp> ddp(const std::shared_ptr<M>& model, const DdpOptions& options = {}) {
  TESSERA_CHECK(model, "ddp: the model is null");
  return ddp(*model, options);
}

/// What a loss that is a mean over `count` items of this rank is multiplied with so that averaging
/// over ranks gives the mean over all items: count * size / total. Ranks may have different counts,
/// 0 included.
double count_weight(ProcessGroup& group, int64_t count);

}  // namespace tessera::parallel
