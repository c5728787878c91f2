// A GPT of a few hundred weights, trained for three steps in any parallel way, and compared.
#pragma once
#include <functional>
#include <vector>

#include "core/tensor/named_tensor.h"
#include "dtensor/dtensor.h"
#include "examples/models/gpt.h"

namespace tessera::test {

inline constexpr int64_t kVocab = 19, kTokens = 6, kBatch = 8;

models::GptOptions small_gpt();

/// Rows `first` .. of the batch of step `step`, the same on every rank.
Tensor ids(int64_t step, int64_t first, int64_t rows);

struct Trained {
  std::vector<double> losses;  // of this rank
  std::vector<NamedTensor> params;
  double norm = 0;
};

struct TrainOptions {
  models::GptOptions model = small_gpt();
  int64_t dp_ranks = 1, dp_rank = 0;  // which rows of a batch are this rank's
  int micro_batches = 1;
  DType dtype = kF64;
};
/// Three clipped AdamW steps. `wrap` makes the model parallel; null: serial.
Trained train(const std::function<void(models::Gpt&)>& wrap, const TrainOptions& options = {});

/// Throws BugError naming the first parameter that differs by more than `tolerance`.
void check_close(const Trained& got, const Trained& want, double tolerance);

}  // namespace tessera::test
