// A plain multi-layer perceptron: linear, ReLU, dropout, ..., linear. B batch.
#pragma once
#include <string_view>

#include "core/nn/nn.h"

namespace tessera::models {

struct MlpOptions {
  int64_t in = 784, hidden = 256, out = 10;
  int64_t layers = 2;  // hidden ones
  double dropout = 0;
};
/// Sets the field called `key` from text; throws UserError as that of the GPT does.
void set_option(MlpOptions& options, std::string_view key, std::string_view value);

/// x [B, ..] with `in` elements per sample -> [B, out].
class Mlp final : public nn::Module {
 public:
  explicit Mlp(const MlpOptions& options);
  /// Classes (targets i64 [B]): mean cross-entropy. Values (targets floats [B, out]): mean square
  /// error.
  Tensor loss(const Tensor& x, const Tensor& targets);
  const MlpOptions options;

 protected:
  Tensor compute(Tensor x) override;

 private:
  nn::SequentialPtr layers_;
};
std::shared_ptr<Mlp> mlp(const MlpOptions& options = {});

}  // namespace tessera::models
