// Pipeline parallelism: a model is cut into stages, one for each rank along a mesh axis; a batch
// goes through them in micro-batches, so that stages work at the same time. Activations travel
// forward, gradients back, as the schedule says (schedule.h). Invariants: nothing is sent before
// the schedule is known to come to its end; the generator travels with the activations, so masks
// are those of the whole model; a stage that fails takes the others with it.
#pragma once
#include <functional>
#include <memory>
#include <span>

#include "core/nn/module.h"
#include "core/optim/clip.h"
#include "dtensor/mesh.h"
#include "parallel/pipeline_parameters.h"
#include "parallel/running_statistics.h"
#include "parallel/schedule.h"

namespace tessera::parallel {

/// What a step reads of one micro-batch. A stage looks at its own part only.
struct MicroBatch {
  Tensor input = {};    // of the first stage
  Tensor target = {};   // of the last
  Tensor samples = {};  // i64 [B], context().samples of every stage that draws; may be undefined
  Tensors beside = {};  // what stages read beside their input (masks): PipelineOptions::forward
};

struct PipelineOptions {
  /// One axis; its rank s runs stage s. Undefined: all ranks of the world.
  DeviceMesh mesh = {};
  /// gpipe, one_forward_one_backward, or a schedule of your own, made when the number of
  /// micro-batches is first seen.
  std::function<Schedule(int stages, int micro_batches)> schedule = one_forward_one_backward;
  /// Parameters of which several stages hold a copy, by name: an embedding that is also the head.
  std::vector<std::string> tied = {};
  /// Told before each backward whether gradients are to be reduced over replicas of the stage: true
  /// for a step's last only. For what ddp and fully_shard return: [=](bool on) {
  /// wrapper->set_sync(on); }. Null: every backward reduces, which is slower.
  std::function<void(bool on)> set_sync = nullptr;
  /// The stage's forward on x, batch.input or what the stage before gave, where it reads more of
  /// the micro-batch than that. Null: (*stage)(x).
  std::function<Tensor(const Tensor& x, const MicroBatch& batch)> forward = nullptr;
  /// Batch-norm's, of this stage: after a step they are the mean of what its micro-batches, those
  /// of replicas included, made of the values before. Must outlive the pipeline. Null: each
  /// micro-batch moves them on. A wrapper of the stage then has .sync_buffers = false.
  RunningStatistics* statistics = nullptr;
};

/// The mean loss of a micro-batch, a one-element tensor.
using StageLoss = std::function<Tensor(const Tensor& output, const Tensor& target)>;

/// This rank's stage and its place in the pipeline. Every rank of the axis makes one and calls
/// step, evaluate and clip_grad_norm together, with the same number of micro-batches.
///
///   auto model = models::gpt_stage(options, mesh.coordinate("pp"), mesh.size("pp"));
///   parallel::Pipeline pipeline(model, {.mesh = mesh["pp"], .tied = {"wte.weight"}});
///   Tensor losses = pipeline.step(micro_batches, [](const Tensor& logits, const Tensor& targets) {
///     return cross_entropy(logits, targets, {.dim = -1});
///   });
///   opt.step(pipeline.clip_grad_norm(1.0).scale);
class Pipeline {
 public:
  /// `stage` takes one activation and gives one: plain float tensors, of shapes that follow from
  /// the input's. Its parameters have the names of the whole model. Wrap it by ddp or fully_shard
  /// over another axis as any model. Throws UserError.
  Pipeline(std::shared_ptr<nn::Module> stage, const PipelineOptions& options);

  /// Runs every micro-batch forward and backward; gradients are those of the mean of the losses. A
  /// micro-batch draws the keys of the first stage's default_generator() from where it stands, each
  /// the same ones (samples tell masks apart), and leaves every rank's generator behind them.
  /// Returns the losses, f64 [micro-batches], on every rank. An error on one stage is thrown there,
  /// and as CommError with its text on the others.
  Tensor step(std::span<const MicroBatch> batch, const StageLoss& loss);
  /// Forward only, nothing is recorded. Call eval() on the stage first where that matters.
  Tensor evaluate(std::span<const MicroBatch> batch, const StageLoss& loss);

  /// optim::clip_grad_norm over the parameters of all stages, copies counted once; equal to one
  /// rank's up to rounding.
  optim::Clip clip_grad_norm(double max_norm, const Tensor& grad_scale = {}) const;
  /// Names, number and values of the parameters of all stages.
  const PipelineParameters& parameters() const { return parameters_; }

  int stage() const { return group_->rank(); }
  int stages() const { return group_->size(); }
  ProcessGroup& group() const { return *group_; }
  /// Of the last step.
  const Schedule& schedule() const { return schedule_; }
  /// Micro-batches of which the last step kept what backward needs, at most.
  int peak_live() const { return peak_live_; }
  /// How long the last step waited for other stages: for messages, and for work to come its way.
  double communication_ms() const { return waited_ms_; }

 private:
  class Run;
  Tensor run(std::span<const MicroBatch> batch, const StageLoss& loss, bool train);
  void prepare(size_t micro_batches);

  std::shared_ptr<nn::Module> stage_;
  PipelineOptions options_;
  Ref<ProcessGroup> group_;
  PipelineParameters parameters_;
  Schedule schedule_;          // of the last number of micro-batches
  int64_t schedule_hash_ = 0;  // stages compare theirs
  bool copies_checked_ = false;
  int peak_live_ = 0;
  double waited_ms_ = 0;
};

}  // namespace tessera::parallel
