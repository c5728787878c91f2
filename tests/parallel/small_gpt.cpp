#include "tests/parallel/small_gpt.h"

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "core/tensor/random.h"

namespace tessera::test {

models::GptOptions small_gpt() {
  return {.vocab = kVocab, .context = kTokens, .layers = 3, .heads = 2, .dim = 10, .bias = true};
}

Tensor ids(int64_t step, int64_t first, int64_t rows) {
  return clone(
      narrow(sample_integers({kBatch, kTokens}, 0, kVocab, uint64_t(step)), 0, first, rows));
}

Run::Run(const std::function<void(models::Gpt&)>& wrap, const TrainOptions& o) : o_(o) {
  Scoped<DType> type(context().default_dtype, o.dtype);
  manual_seed(3);
  model_ = models::gpt(o.model);
  if (wrap) wrap(*model_);
  optimizer_ = std::make_unique<optim::AdamW>(model_->named_parameters(),
                                              optim::AdamWOptions{.lr = 0.01, .weight_decay = 0.1});
}

double Run::step(int64_t number) {
  Scoped<DType> type(context().default_dtype, o_.dtype);
  int64_t rows = kBatch / o_.dp_ranks / o_.micro_batches;
  double total = 0;
  for (int64_t k = 0; k < o_.micro_batches; ++k) {
    int64_t first = (k * o_.dp_ranks + o_.dp_rank) * rows;
    std::vector<int64_t> numbers;
    for (int64_t r = 0; r < rows; ++r) numbers.push_back(number * kBatch + first + r);
    Scoped<Tensor> samples(context().samples, from_values<int64_t>(numbers, {rows}));
    default_generator().seek(uint64_t(number) << 20);
    LossParallel allowed;
    Tensor loss = model_->loss(ids(number, first, rows), ids(number + 100, first, rows));
    total += loss.item<double>() / o_.micro_batches;
    backward(loss * (1.0 / o_.micro_batches));
  }
  optim::Clip clip = optim::clip_grad_norm(optimizer_->parameters(), 0.5);
  norm_ = clip.norm.item<double>();
  optimizer_->step(clip.scale);
  optimizer_->zero_grad();
  return total;
}

Trained train(const std::function<void(models::Gpt&)>& wrap, const TrainOptions& o) {
  Run run(wrap, o);
  Trained t;
  for (int64_t step = 0; step < 3; ++step) t.losses.push_back(run.step(step));
  t.norm = run.norm();
  for (NamedTensor& p : run.model().named_parameters())
    t.params.push_back({p.name, full_tensor(p.tensor.detach())});
  return t;
}

void check_close(const Trained& got, const Trained& want, double tolerance) {
  for (size_t i = 0; i < want.params.size(); ++i) {
    const Tensor &a = got.params[i].tensor, &b = want.params[i].tensor;
    TESSERA_ASSERT(got.params[i].name == want.params[i].name && a.shape() == b.shape(),
                   "{} where {} is due", got.params[i].name, want.params[i].name);
    double diff = amax(abs(a - b)).item<double>();
    TESSERA_ASSERT(diff <= tolerance, "{} differs by {}", want.params[i].name, diff);
  }
  TESSERA_ASSERT(std::abs(got.norm - want.norm) <= tolerance, "norm {} where {} is due", got.norm,
                 want.norm);
}

}  // namespace tessera::test
