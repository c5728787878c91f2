// Residual networks for images (He et al. 2015), version 1.5: a bottleneck strides in its 3 x 3
// convolution, not in the first 1 x 1. Names of parameters are torchvision's. B batch.
#pragma once
#include <string_view>

#include "core/nn/nn.h"

namespace tessera::models {

struct ResNetOptions {
  int64_t depth = 50;  // 18, 34: blocks of two 3 x 3; 50, 101, 152: bottlenecks
  int64_t classes = 1000;
  int64_t width = 64;         // channels of the first stage
  bool small_images = false;  // the stem for 32 x 32: one 3 x 3, no stride, no pooling
};
/// Sets the field called `key` from text; throws UserError as that of the GPT does.
void set_option(ResNetOptions& options, std::string_view key, std::string_view value);

/// x [B, 3, H, W] -> logits [B, classes].
class ResNet final : public nn::Module {
 public:
  explicit ResNet(const ResNetOptions& options);
  void reset(const nn::InitKeys& keys) override;
  /// Mean cross-entropy; targets i64 [B].
  Tensor loss(const Tensor& x, const Tensor& targets);
  const ResNetOptions options;

 protected:
  Tensor compute(Tensor x) override;

 private:
  std::shared_ptr<nn::Conv2d> conv1_;
  std::shared_ptr<nn::BatchNorm2d> bn1_;
  std::vector<nn::SequentialPtr> stages_;
  nn::LinearPtr fc_;
};
std::shared_ptr<ResNet> resnet(const ResNetOptions& options = {});

}  // namespace tessera::models
