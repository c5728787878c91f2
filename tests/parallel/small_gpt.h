// A GPT of a few hundred weights, trained for three steps in any parallel way, and compared.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "core/optim/optim.h"
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
/// A model with its optimizer, under way. `wrap` makes the model parallel; null: serial.
class Run {
 public:
  Run(const std::function<void(models::Gpt&)>& wrap, const TrainOptions& options = {});
  /// One clipped AdamW step on the batch of `number`; the loss on this rank's rows.
  double step(int64_t number);
  double norm() const { return norm_; }
  models::Gpt& model() { return *model_; }
  optim::Optimizer& optimizer() { return *optimizer_; }

 private:
  TrainOptions o_;
  models::GptPtr model_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  double norm_ = 0;
};

/// Three steps.
Trained train(const std::function<void(models::Gpt&)>& wrap, const TrainOptions& options = {});

/// Throws BugError naming the first parameter that differs by more than `tolerance`.
void check_close(const Trained& got, const Trained& want, double tolerance);

}  // namespace tessera::test
