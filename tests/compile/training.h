// The training step of a small GPT: forward, backward, clipping, AdamW, dropout and its generator.
#pragma once
#include "core/dispatch/context.h"
#include "core/ops/create.h"
#include "core/ops/random.h"
#include "core/optim/clip.h"
#include "core/optim/optim.h"
#include "examples/models/gpt.h"
#include "tests/compile/bits.h"

namespace tessera::test {

struct Training {
  Generator generator{5};
  models::GptPtr model;
  std::unique_ptr<optim::AdamW> opt;

  explicit Training(double dropout)
      : Training(models::GptOptions{.vocab = 11,
                                    .context = 8,
                                    .layers = 2,
                                    .heads = 2,
                                    .dim = 16,
                                    .dropout = dropout,
                                    .bias = true}) {}
  explicit Training(const models::GptOptions& options) : model(models::gpt(options)) {
    model->init(3);
    opt = std::make_unique<optim::AdamW>(optim::decay_matrices_only(model->named_parameters(), 0.1),
                                         optim::AdamWOptions{.lr = 1e-2, .betas = {0.9, 0.99}});
  }

  Tensors step(const Tensor& ids, const Tensor& targets) {
    Scoped<Generator*> draws(context().generator, &generator);
    Tensor loss = model->loss(ids, targets);
    loss.backward();
    optim::Clip clip = optim::clip_grad_norm(model->parameters(), 0.5);
    opt->step(clip.scale);
    opt->zero_grad();
    return {loss.detach(), clip.norm};
  }

  std::vector<NamedTensor> state() const {
    std::vector<NamedTensor> all = model->named_parameters();
    for (NamedTensor& t : opt->named_state()) all.push_back(std::move(t));
    all.push_back({"generator", generator.state()});
    return all;
  }
};

inline std::pair<Tensor, Tensor> batch(int number) {
  Generator g(uint64_t(100 + number));
  return {randint(0, 11, {3, 8}, {}, g.next_key()), randint(0, 11, {3, 8}, {}, g.next_key())};
}

}  // namespace tessera::test
