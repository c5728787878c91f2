// Distributed data parallelism: parameters are replicated, each rank runs its part of the batch,
// and gradients are averaged in buckets while backward still runs (Li et al., "PyTorch
// Distributed", VLDB 2020). Invariants: buckets are reduced in the same order on every rank;
// reading a gradient waits for its bucket, so a program needs no call between backward and
// optimizer; sums have a fixed order.
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
  Ref<ProcessGroup> group = {};  // null: the world
  size_t bucket_bytes = 0;  // 0: the size that measures best on the device (CPU: kCpuBucketBytes)
  // The size of the first bucket, which should be sent early; 0: bucket_bytes.
  size_t first_bucket_bytes = 0;
  // Whether a parameter without a gradient counts as zero; otherwise it is named in an error.
  bool allow_unused = false;
  bool rebuild = true;  // after the first step, order buckets as gradients became ready
  // Whether micro-batches are summed in a balanced tree instead of one after the other, so that K
  // micro-batches on each of R ranks give the bits of any other K and R with the same product
  // (powers of two). It takes log2(K) more gradient buffers.
  bool tree_accumulation = false;
  // Whether persistent float buffers that a training forward writes become the mean of their values
  // on all ranks (running_statistics.h). Otherwise each rank keeps its own.
  bool sync_buffers = true;
};
inline constexpr size_t kCpuBucketBytes = size_t(2) << 20;

/// Sums gradients over micro-batches and ranks. Ddp owns one, and every trainable parameter
/// delivers its gradient to it.
class Reducer final : public GradSink {
 public:
  Reducer(std::vector<NamedTensor> parameters, const DdpOptions& options);
  ~Reducer() override;
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  void deliver(int slot, Tensor grad) override;
  /// Returns the parameter's view of its bucket, for backward to write to. Returns none where a
  /// gradient of earlier backwards is still to be added to, or where the view is held elsewhere, so
  /// that this backward may still read it.
  Tensor grad_buffer(int slot) override;
  void backward_finished() override;
  /// If no other rank waits for this backward (on one rank, or with sync off), forgets what it
  /// delivered, so that it can be repeated. Otherwise aborts the group with the reason. What it has
  /// added to gradients of earlier micro-batches stays, as without ddp: the step must then begin
  /// anew, with zero_grad.
  void backward_abandoned(const std::string& why) override;
  void cleared(int slot) override;
  /// Calls `f` when a gradient is cleared and no parameter has one any more: the step begins anew.
  void on_cleared(std::function<void()> f) { on_cleared_ = std::move(f); }
  /// See DataParallel::set_sync.
  void set_sync(bool sync) { sync_.write(sync); }
  bool sync() const { return sync_.read() != 0; }
  ProcessGroup& group() const { return *group_; }
  /// See DataParallel::communication_ms.
  double communication_ms() { return time_.take_ms(); }

 private:
  struct Bucket {
    std::vector<int> slots;
    Tensor flat;                 // what is reduced; gradients are views of it
    std::vector<Tensor> levels;  // of the accumulation tree
    size_t arrived = 0;
    uint32_t owners = 0;  // reference count of the memory while only `flat` and place_ hold it
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
  std::vector<std::pair<int, Tensor>> place_;  // by slot: its bucket, and its view of `flat`
  std::vector<bool> seen_, used_;  // by slot: in this backward; since the last reduction
  std::vector<int> ready_order_;
  size_t next_launch_ = 0;
  int64_t micro_batch_ = 0;  // since the last reduction
  CommunicationTime time_;   // of reductions
  std::function<void()> on_cleared_;
  TrackedSetting sync_{true};
  bool rebuilt_ = false;
};

/// Broadcasts parameters and persistent buffers of rank 0 and returns the reducer of the model's
/// trainable parameters; gradients are reduced while it lives.
[[nodiscard]] std::unique_ptr<Reducer> make_reducer(nn::Module& model, const DdpOptions& options);

/// What ddp attaches to a model, which keeps it alive.
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
/// once, reduces gradients, and makes running statistics equal on all ranks after each training
/// forward (DdpOptions::sync_buffers). The program goes on using the model itself; the result is
/// for no_sync and reports. Throws UserError for a model that is wrapped or sharded already.
std::shared_ptr<Ddp> ddp(nn::Module& model, const DdpOptions& options = {});
template <class M>
std::shared_ptr<Ddp> ddp(const std::shared_ptr<M>& model, const DdpOptions& options = {}) {
  TESSERA_CHECK(model, "ddp: the model is null");
  return ddp(*model, options);
}

/// The factor for a loss that is a mean over `count` items of this rank, with which averaging over
/// ranks gives the mean over all items: count * size / total. Ranks may have different counts, 0
/// included.
double count_weight(ProcessGroup& group, int64_t count);

}  // namespace tessera::parallel
