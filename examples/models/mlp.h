// A plain multi-layer perceptron: linear, ReLU, dropout, ..., linear. B batch.
#pragma once
#include <string_view>

#include "core/nn/nn.h"
#include "examples/models/options.h"
#include "parallel/tensor_parallel.h"

namespace tessera::models {

struct MlpOptions {
  int64_t in = 784, hidden = 256, out = 10;
  int64_t layers = 2;  // hidden ones
  double dropout = 0;
};
/// Lists every field by its name.
Fields fields_of(MlpOptions& options);
/// Sets the field `key` from text; throws UserError as that of the GPT does.
void set_option(MlpOptions& options, std::string_view key, std::string_view value);

/// The part of an Mlp to build: linear layers [begin, end) of layers + 1, with what follows each.
struct MlpPart {
  int64_t begin = 0, end = 0;
};

/// x [B, ..] with `in` elements per sample -> [B, out]. A part takes and returns activations [B,
/// hidden] where it is cut; its parameters have the names and initial values that they have in the
/// whole model.
class Mlp final : public nn::Module {
 public:
  explicit Mlp(const MlpOptions& options) : Mlp(options, {0, options.layers + 1}) {}
  Mlp(const MlpOptions& options, MlpPart part);
  /// Returns the mean cross-entropy for classes (targets i64 [B]), the mean square error for values
  /// (targets floats [B, out]).
  Tensor loss(const Tensor& x, const Tensor& targets);
  const MlpOptions options;
  const MlpPart part;

 protected:
  Tensor forward(Tensor x) override;

 private:
  nn::SequentialPtr layers_;
};
std::shared_ptr<Mlp> mlp(const MlpOptions& options = {});
/// Makes stage `stage` of an Mlp cut before linear layers (parallel::stage_range). Throws UserError
/// for more stages than linear layers.
std::shared_ptr<Mlp> mlp_stage(const MlpOptions& options, int stage, int stages);

/// Cuts hidden layers in pairs, column-wise and row-wise; a layer that is left over stays whole.
parallel::ParallelPlan tensor_parallel_plan(const MlpOptions& options);

}  // namespace tessera::models
