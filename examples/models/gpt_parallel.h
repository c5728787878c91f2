// How a GPT is cut over a tensor-parallel axis.
#pragma once
#include "examples/models/gpt.h"
#include "parallel/tensor_parallel.h"

namespace tessera::models {

/// Attention by heads, feed-forward by its inner width, embedding and head by the vocabulary; the
/// logits come out cut by the vocabulary, which a loss takes in a LossParallel scope. With
/// `sequence_parallel`, norms and dropouts between the regions work on a part of the sequence.
parallel::ParallelPlan tensor_parallel_plan(const GptOptions& options,
                                            bool sequence_parallel = false);

}  // namespace tessera::models
