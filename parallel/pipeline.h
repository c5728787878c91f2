// Pipeline parallelism: a model is cut into stages, one for each rank along a mesh axis; a batch
// passes through them in micro-batches, so that stages work at the same time. Activations are sent
// forward and gradients back in the order of the schedule (schedule.h). Invariants: nothing is sent
// before the schedule is known to finish; the generator's state travels with the activations, so
// dropout draws the masks of the whole model; when a stage fails, the others fail with it.
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

/// One micro-batch of a step. A stage reads only the parts that concern it.
struct MicroBatch {
  Tensor input = {};    // read by the first stage
  Tensor target = {};   // read by the last stage
  Tensor samples = {};  // i64 [B]: context().samples where a stage draws; may be undefined
  // What stages read besides their input (masks): see PipelineOptions::forward.
  Tensors beside = {};
};

struct PipelineOptions {
  /// A mesh of one axis, whose rank s runs stage s. Undefined: all ranks of the world.
  DeviceMesh mesh = {};
  /// gpipe, one_forward_one_backward, or a schedule of your own. It is called when a number of
  /// micro-batches is first seen.
  std::function<Schedule(int stages, int micro_batches)> schedule = one_forward_one_backward;
  /// The names of parameters of which several stages hold a copy, such as an embedding that is also
  /// the head.
  std::vector<std::string> tied = {};
  /// Called before each backward with whether gradients are to be reduced over replicas of the
  /// stage, which is true only for the last of a step. With ddp or fully_shard: [=](bool on) {
  /// wrapper->set_sync(on); }. Null: every backward reduces, which is slower.
  std::function<void(bool on)> set_sync = nullptr;
  /// The forward of a stage that reads more of the micro-batch than x, which is batch.input or the
  /// activation of the stage before. Null: (*stage)(x).
  std::function<Tensor(const Tensor& x, const MicroBatch& batch)> forward = nullptr;
  /// The running statistics of this stage (batch-norm's): after a step they are the mean of what
  /// its micro-batches, those of replicas included, made of the values before the step. It must
  /// outlive the pipeline. Null: each micro-batch updates them in turn. A wrapper of the stage must
  /// then have .sync_buffers = false.
  RunningStatistics* statistics = nullptr;
};

/// Returns the mean loss of a micro-batch, a tensor of one element.
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
  /// `stage` takes one activation and returns one: plain float tensors whose shapes follow from the
  /// input's. Its parameters have the names they have in the whole model. It may be wrapped by ddp
  /// or fully_shard over another axis like any model. Throws UserError.
  Pipeline(std::shared_ptr<nn::Module> stage, const PipelineOptions& options);

  /// Runs every micro-batch forward and backward; gradients are those of the mean of the losses.
  /// Each micro-batch draws the same keys of the first stage's default_generator(), beginning at
  /// its present state (`samples` makes the masks differ); after the step every rank's generator is
  /// behind them. Returns the losses, f64 [micro-batches], on every rank. An error on one stage is
  /// thrown there, and as CommError with its text on the others.
  Tensor step(std::span<const MicroBatch> batch, const StageLoss& loss);
  /// Runs forward only and records nothing. Call eval() on the stage first where that matters.
  Tensor evaluate(std::span<const MicroBatch> batch, const StageLoss& loss);

  /// Does what optim::clip_grad_norm does, over the parameters of all stages, with copies counted
  /// once. The norm equals that on one rank up to rounding.
  optim::Clip clip_grad_norm(double max_norm, const Tensor& grad_scale = {}) const;
  /// Names, number and values of the parameters of all stages.
  const PipelineParameters& parameters() const { return parameters_; }

  int stage() const { return group_->rank(); }
  int stages() const { return group_->size(); }
  ProcessGroup& group() const { return *group_; }
  /// The schedule of the last step.
  const Schedule& schedule() const { return schedule_; }
  /// The most micro-batches whose state for backward the last step kept at one time.
  int peak_live() const { return peak_live_; }
  /// How long the last step waited for other stages.
  double communication_ms() const { return waited_ms_; }

 private:
  class Run;
  Tensor run(std::span<const MicroBatch> batch, const StageLoss& loss, bool train);
  void prepare(size_t micro_batches);

  std::shared_ptr<nn::Module> stage_;
  PipelineOptions options_;
  Ref<ProcessGroup> group_;
  PipelineParameters parameters_;
  Schedule schedule_;          // for the last number of micro-batches
  int64_t schedule_hash_ = 0;  // of this rank's schedule, which stages compare
  bool copies_checked_ = false;
  int peak_live_ = 0;
  double waited_ms_ = 0;
};

}  // namespace tessera::parallel
