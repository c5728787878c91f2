// A training step as `train` runs it: forward, backward, clipping by norm, AdamW, and reading the
// loss back; on tokens or values drawn in advance; on the default device of the thread that makes
// it. Invariant: the same model, batch and options give the same work on every call.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/process_group.h"
#include "compile/compile.h"
#include "core/nn/module.h"
#include "core/optim/optim.h"
#include "examples/models/registry.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"

namespace tessera::bench {

struct WorkloadOptions {
  std::string model = "gpt-nano";
  int64_t batch_size = 0;  // 0: the model's usual one
  int64_t seq_len = 0;     // 0: the model's usual one, else its context
  uint64_t seed = 1337;
  std::vector<std::string> set = {};  // key=value, fields of the model's options
  bool compile = false;
  DType precision = kF32;  // of an autocast around forward; f32: none
  bool fsdp = false;       // where there is a group: parameters are sharded over it
};

class Workload {
 public:
  /// Runs under ddp or fsdp on `group` unless that is null; the options are then those of one rank.
  explicit Workload(const WorkloadOptions& options, Ref<ProcessGroup> group = nullptr);
  /// Runs one optimizer step on the next of a few batches, compiled if the options say so; returns
  /// the loss.
  double step() { return enqueue().item<double>(); }
  /// The same, without waiting for the loss: a device may still have the step to do.
  Tensor enqueue();
  /// Runs the same, but not compiled and without reading the loss, so that it can be recorded.
  Tensor train();
  /// The report of the compiled steps so far.
  const compiler::CompileReport& compile_report() const { return compiled_->report(); }
  /// Throws UserError that begins with "bench `command`" where compiled steps are not replayed.
  void check_replayed(std::string_view command) const;
  int64_t tokens_per_step() const { return tokens_; }  // 0: not a language model
  int64_t seq_len() const { return tokens_ / batch_; }
  int64_t batch_size() const { return batch_; }
  int64_t parameters() const { return model_->num_parameters(); }
  /// Returns what a checkpoint would hold: the tensors of model and optimizer.
  std::vector<NamedTensor> state() const;

 private:
  struct Batch {
    Tensor inputs, targets;
  };
  Tensor train_on(const Batch& batch);
  const Batch& next_batch() { return batches_[next_++ % batches_.size()]; }
  void make_batches(const models::ModelSpec& spec, const models::ModelOptions& options,
                    int64_t seq_len);
  void make_optimizer(const models::ModelSpec& spec);

  std::shared_ptr<nn::Module> model_;
  models::Loss loss_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::vector<Batch> batches_;
  size_t next_ = 0;
  DType precision_;
  int64_t batch_ = 0, tokens_ = 0;
  using Step = std::function<Tensor(const Tensor& inputs, const Tensor& targets)>;
  std::unique_ptr<compiler::Compiled<Step>> compiled_;  // null: steps run eagerly
};

}  // namespace tessera::bench
