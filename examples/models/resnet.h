// Residual networks for images (He et al. 2015), version 1.5: a bottleneck strides in its 3 x 3
// convolution, not in the first 1 x 1. Parameters have torchvision's names. B batch.
#pragma once
#include <string_view>

#include "core/nn/nn.h"
#include "examples/models/options.h"
#include "parallel/tensor_parallel.h"

namespace tessera::models {

struct ResNetOptions {
  int64_t depth = 50;  // 18, 34: blocks of two 3 x 3; 50, 101, 152: bottlenecks
  int64_t classes = 1000;
  int64_t width = 64;         // channels of the first stage
  bool small_images = false;  // the stem for 32 x 32: one 3 x 3 without stride or pooling
  bool bottleneck() const { return depth >= 50; }
};
/// The number of layers (layer1, layer2, ...): each halves the image of the one before and doubles
/// its channels.
inline constexpr int kResNetLayers = 4;
/// The number of blocks in all layers. Throws UserError for a depth that does not exist.
int64_t num_blocks(const ResNetOptions& options);
/// Lists every field by its name.
Fields fields_of(ResNetOptions& options);
/// Sets the field `key` from text; throws UserError as that of the GPT does.
void set_option(ResNetOptions& options, std::string_view key, std::string_view value);

/// The part of a ResNet to build: blocks [begin, end), counted over all layers, the stem if it
/// begins at 0, pooling and the classifier if it ends at the last block.
struct ResNetPart {
  int64_t begin = 0, end = 0;
};

/// x [B, 3, H, W] -> logits [B, classes]. A part takes and returns activations [B, C, H', W'] where
/// it is cut; its parameters have the names and initial values that they have in the whole model.
class ResNet final : public nn::Module {
 public:
  explicit ResNet(const ResNetOptions& options) : ResNet(options, {0, num_blocks(options)}) {}
  ResNet(const ResNetOptions& options, ResNetPart part);
  void reset(const nn::InitKeys& keys) override;
  /// Returns the mean cross-entropy; targets i64 [B].
  Tensor loss(const Tensor& x, const Tensor& targets);
  const ResNetOptions options;
  const ResNetPart part;

 protected:
  Tensor forward(Tensor x) override;

 private:
  Tensor stem(Tensor x);
  std::shared_ptr<nn::Conv2d> conv1_;  // null where the part does not begin the model
  std::shared_ptr<nn::BatchNorm2d> bn1_;
  std::vector<nn::SequentialPtr> layers_;
  nn::LinearPtr fc_;  // null where the part does not end it
};
std::shared_ptr<ResNet> resnet(const ResNetOptions& options = {});
/// Makes stage `stage` of a ResNet cut between blocks (parallel::stage_range). Throws UserError for
/// more stages than blocks.
std::shared_ptr<ResNet> resnet_stage(const ResNetOptions& options, int stage, int stages);

/// Cuts the convolutions of a block, and their norms, by output channels and then by input
/// channels; what a block adds up is whole on every rank, and so is the stem. A bottleneck's second
/// convolution takes the channels of the first and leaves its own cut for the third.
parallel::ParallelPlan tensor_parallel_plan(const ResNetOptions& options);

}  // namespace tessera::models
