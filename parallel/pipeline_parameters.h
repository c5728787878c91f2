// The parameters of a model that is cut into stages, and its buffers. Invariant: each is known by
// its name in the whole model, and one stage has it; a tied parameter may be on several stages,
// which then hold copies of it: they start equal, their gradients are summed, and it counts once.
// Of a buffer that several stages have, the first one's is that of the model.
#pragma once
#include <string>
#include <vector>

#include "collectives/process_group.h"
#include "core/nn/module.h"

namespace tessera::parallel {

/// A parameter or a persistent buffer of the whole model, and the stages that hold a copy,
/// ascending.
struct PlacedTensor {
  std::string name;
  Shape shape;
  DType dtype = kF32;
  bool trainable = true, is_buffer = false;
  std::vector<int> stages;
};

/// One rank's view. All members but counted() are called by every rank of the pipeline together.
class PipelineParameters {
 public:
  /// Ranks of `pipeline` tell each other what their stages hold. Throws UserError on every rank
  /// when a name is on several stages and not among `tied`, when copies differ in shape, dtype or
  /// in whether they are trained, or when no stage has a parameter of a tied name.
  PipelineParameters(std::shared_ptr<nn::Module> stage, Ref<ProcessGroup> pipeline,
                     const std::vector<std::string>& tied);

  /// Of all stages: those of stage 0 first, each where it is met first.
  const std::vector<PlacedTensor>& all() const { return all_; }
  int64_t num_parameters() const;
  /// This stage's parameters for which it is the first stage that holds them: what it contributes
  /// to a sum over the whole model.
  std::vector<NamedTensor> counted() const;
  /// Throws UserError where copies hold different values.
  void check_copies_equal() const;
  /// Throws UserError where a copy has a gradient already.
  void check_copies_clear() const;
  /// Each copy's gradient becomes the sum over all copies, added in the order of the stages.
  void sum_gradients_of_copies() const;
  /// All parameters of the model, whole and plain, on every rank.
  std::vector<NamedTensor> gather() const { return gather(false); }
  /// And its persistent buffers: Module::state() of the whole model.
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
