// The base class of all optimizers holds groups of parameters, their options and their state.
// Invariant: everything that changes from step to step is a tensor (learning rates, the step count,
// moments), so a traced step freezes none of it and a checkpoint is a list of named tensors.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/dispatch/tracked_setting.h"
#include "core/tensor/named_tensor.h"

namespace tessera::optim {

/// Parameters with options of their own; an option that is not given is the optimizer's.
struct ParamGroup {
  std::vector<NamedTensor> params;
  std::optional<double> lr = {}, weight_decay = {};
};

/// What an optimizer takes: model->parameters(), model->named_parameters() (names then name the
/// state), or groups. Frozen parameters may be among them; they have no state until they get a
/// gradient.
class Params {
 public:
  Params(const std::vector<Tensor>& params);
  Params(std::vector<NamedTensor> params);
  Params(std::vector<ParamGroup> groups) : groups(std::move(groups)) {}
  std::vector<ParamGroup> groups;
};

/// Two groups: tensors of two and more dims (matrices, embeddings) decay, the rest (norms, biases)
/// do not.
Params decay_matrices_only(std::vector<NamedTensor> params, double weight_decay);

struct Group {
  std::vector<NamedTensor> params;
  // [kind][parameter], of its shape; undefined before the first gradient if it began frozen
  std::vector<std::vector<Tensor>> state;
  Tensor lr;            // 0-d f64
  double lr_ratio = 1;  // to the optimizer's own rate
  double weight_decay = 0;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// One update of every parameter that has a gradient, from `scale` (0-d f64; undefined: 1) times
  /// that gradient. Clipping and loss scaling pass their factor here and cost no pass over the
  /// gradients. The step count is one for all parameters. Throws UserError for a parameter that was
  /// replaced in its module since.
  void step(const Tensor& scale = {});
  /// As step, but where `scale` is infinite or NaN, parameters, state and the step count stay as
  /// they are. That is a select, so the program reads nothing. GradScaler calls this.
  void step_if_finite(const Tensor& scale);
  /// Drops all gradients.
  void zero_grad();
  /// Each group gets `lr` times its ratio. Call it between steps, outside of a compiled step, with
  /// the rate of a schedule.
  void set_lr(double lr);
  /// As set by set_lr; waits for the device.
  double lr() const;

  /// The group's weight decay from the next step on. A compiled step is recorded anew for it.
  void set_weight_decay(size_t group, double weight_decay);

  const std::vector<Group>& groups() const { return groups_; }
  std::vector<Tensor> parameters() const;
  /// 0-d f64: steps done.
  const Tensor& step_count() const { return step_count_; }
  /// "step", "lr.<group>", "<kind>.<parameter>" as PyTorch calls the kinds: exp_avg, exp_avg_sq,
  /// momentum_buffer.
  std::vector<NamedTensor> named_state() const;
  /// Throws UserError listing every missing, unexpected and mismatched name, before anything is
  /// written.
  void load_state(std::span<const NamedTensor> state);

 protected:
  Optimizer(Params params, double lr, double weight_decay, std::vector<std::string> kinds);

  /// The parameters of a group that have gradients, their gradients and their state by kind.
  struct Lists {
    std::vector<Tensor> params, grads;
    std::vector<std::vector<Tensor>> state;
    std::vector<size_t> index;  // in the group
    bool if_finite = false;     // nothing changes where the scale is not finite
  };
  virtual void update(const Group& group, const Lists& lists, const Tensor& scale) = 0;

 private:
  void check_not_replaced() const;
  void run(const Tensor& scale);
  void begin(Group& group, size_t i);
  void collect(Group& group);
  std::vector<std::string> kinds_;
  std::vector<Group> groups_;
  TrackedChanges weight_decays_;
  Tensor step_count_, one_;
  Lists lists_;  // kept for its capacity
};

}  // namespace tessera::optim
