// The parameters and buffers of a model that is cut into stages. Invariant: each has its name in
// the whole model and belongs to one stage. A tied parameter may be on several stages, which then
// hold copies: these start equal, their gradients are summed, and the parameter counts once. If
// several stages have the same buffer, the model's is that of the first stage.
// Internal: not part of the public interface.
#pragma once
#include <string>
#include <vector>

#include "collectives/process_group.h"
#include "core/nn/module.h"

namespace tessera::parallel {

/// A parameter or persistent buffer of the whole model, and the stages that hold a copy of it, in
/// ascending order.
struct PlacedTensor {
  std::string name;
  Shape shape;
  DType dtype = kF32;
  bool trainable = true, is_buffer = false;
  std::vector<int> stages;
};

/// One rank's view of them. All ranks of the pipeline must call its functions together, except
/// counted().
class PipelineParameters {
 public:
  /// The ranks of `pipeline` exchange what their stages hold. Throws UserError on every rank when a
  /// name is on several stages and not among `tied`, when copies differ in shape, dtype or
  /// trainability, or when no stage has a parameter of a tied name.
  PipelineParameters(std::shared_ptr<nn::Module> stage, Ref<ProcessGroup> pipeline,
                     const std::vector<std::string>& tied);

  /// The parameters of all stages: those of stage 0 first, each listed at the first stage that has
  /// it.
  const std::vector<PlacedTensor>& all() const { return all_; }
  int64_t num_parameters() const;
  /// Those parameters of this stage for which it is the first stage that holds them: its
  /// contribution to a sum over the whole model.
  std::vector<NamedTensor> counted() const;
  /// Throws UserError where copies hold different values.
  void check_copies_equal() const;
  /// Throws UserError where a copy has a gradient already.
  void check_copies_clear() const;
  /// Sets the gradient of each copy to the sum over all copies, added in the order of the stages.
  void sum_gradients_of_copies() const;
  /// Returns all parameters of the model, whole and plain, on every rank.
  std::vector<NamedTensor> gather() const { return gather(false); }
  /// Returns these and the persistent buffers: Module::state() of the whole model.
  std::vector<NamedTensor> gather_state() const { return gather(true); }

 private:
  struct Copies {  // of one parameter that other stages hold as well
    std::string name;
    Ref<ProcessGroup> group;  // of the stages that hold it
  };
  std::vector<NamedTensor> gather(bool buffers) const;
  Tensor at(const std::string& name) const;
  void exchange(const std::vector<std::string>& tied);
  void make_groups();

  std::shared_ptr<nn::Module> stage_;
  Ref<ProcessGroup> pipeline_;
  std::vector<PlacedTensor> all_;
  std::vector<Copies> copies_;
};

}  // namespace tessera::parallel
