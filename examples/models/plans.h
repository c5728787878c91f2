// How the models here are cut over a tensor-parallel axis.
#pragma once
#include "examples/models/bert.h"
#include "examples/models/gpt.h"
#include "examples/models/mlp.h"
#include "examples/models/resnet.h"
#include "parallel/tensor_parallel.h"

namespace tessera::models {

/// Attention by heads, feed-forward by its inner width, embedding and head by the vocabulary; the
/// logits come out cut by the vocabulary, which a loss takes in a LossParallel scope; under exact
/// contraction a vocabulary that is no multiple of its leaves stays whole. With
/// `sequence_parallel`, norms and dropouts between the regions work on a part of the sequence.
parallel::ParallelPlan tensor_parallel_plan(const GptOptions& options,
                                            bool sequence_parallel = false);

/// Attention by heads, feed-forward by its inner width; embeddings and head stay whole.
parallel::ParallelPlan tensor_parallel_plan(const BertOptions& options);

/// Hidden layers in pairs, column-wise and row-wise; a layer that is left over stays whole.
parallel::ParallelPlan tensor_parallel_plan(const MlpOptions& options);

/// Convolutions of a block by output channels, then by input channels, as their norms are; what a
/// block adds up is whole on every rank, and so is the stem. A bottleneck's second convolution
/// takes the first's channels and leaves its own cut for the third.
parallel::ParallelPlan tensor_parallel_plan(const ResNetOptions& options);

}  // namespace tessera::models
