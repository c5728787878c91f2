// Training steps of a small GPT under the wrappers of parallel/, for tests that compile them.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/ops.h"
#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/dispatch/default_device.h"
#include "core/nn/nn.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "dtensor/dtensor.h"
#include "examples/models/gpt.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "parallel/tensor_parallel.h"

namespace tessera::test::wrapped {

inline constexpr int64_t kVocab = 11, kTokens = 6, kRows = 2;

inline models::GptOptions options() {
  return {.vocab = kVocab,
          .context = kTokens,
          .layers = 2,
          .heads = 2,
          .dim = 8,
          .dropout = 0.1,
          .bias = true};
}

// What a wrapper provides: what must live as long as the model, and how micro-batches before the
// last stay on their rank.
struct Wrapped {
  std::shared_ptr<void> keep;
  std::function<void(bool)> set_sync = [](bool) {};
};
struct Case {
  int ranks = 2;
  std::function<Wrapped(models::Gpt&)> wrap;
  std::string data_axis = {};  // ranks along it have batches of their own; empty: all do
  std::vector<MeshAxis> mesh = {};
  int64_t micro_batches = 1;
  bool sync_each = false;  // every micro-batch is reduced
  int eager_steps = 0;     // before the traced one
};

class Training {
 public:
  Training(const Case& c, int64_t data_rank) : c_(c), data_rank_(data_rank) {
    generator_.to(default_device());
    model_ = models::gpt(options());
    model_->init(3);
    wrapped_ = c.wrap(*model_);
    optimizer_ =
        std::make_unique<optim::AdamW>(optim::decay_matrices_only(model_->named_parameters(), 0.1),
                                       optim::AdamWOptions{.lr = 1e-2, .betas = {0.9, 0.99}});
  }

  // ids [B, T], targets [B, T], sample numbers [B] of each micro-batch of step `number`.
  std::vector<Tensor> batch(int64_t number) const {
    std::vector<Tensor> all;
    for (int64_t k = 0; k < c_.micro_batches; ++k) {
      Generator g(uint64_t((number * 16 + data_rank_) * 16 + k));
      for (int i = 0; i < 2; ++i)
        all.push_back(randint(0, kVocab, {kRows, kTokens}, {}, g.next_key()));
      int64_t first = ((number * 16 + data_rank_) * 16 + k) * kRows;
      all.push_back(from_values<int64_t>({first, first + 1}, {kRows}));
    }
    return all;
  }

  // The losses of this rank's micro-batches, the norm of all gradients, and what a report needs:
  // the last loss of every rank.
  Tensors step(const std::vector<Tensor>& batch) {
    Scoped<Generator*> draws(context().generator, &generator_);
    Tensors out;
    optimizer_->zero_grad();
    for (int64_t k = 0; k < c_.micro_batches; ++k) {
      const Tensor* b = &batch[size_t(3 * k)];
      Scoped<Tensor> samples(context().samples, b[2]);
      wrapped_.set_sync(c_.sync_each || k + 1 == c_.micro_batches);
      LossParallel spread_vocabulary;
      Tensor loss = model_->loss(b[0], b[1]);
      backward(c_.micro_batches > 1 ? loss * (1.0 / double(c_.micro_batches)) : loss);
      out.push_back(full_tensor(loss.detach()));
    }
    optim::Clip clip = optim::clip_grad_norm(optimizer_->parameters(), 0.5);
    optimizer_->step(clip.scale);
    out.push_back(full_tensor(clip.norm));
    out.push_back(all_gather(reshape(out[out.size() - 2], {1}), world_group()));
    return out;
  }
  void set_lr(double lr) { optimizer_->set_lr(lr); }

  // This rank's pieces.
  std::vector<NamedTensor> state() const {
    std::vector<NamedTensor> all = model_->named_parameters();
    for (NamedTensor& t : optimizer_->named_state()) all.push_back(std::move(t));
    for (NamedTensor& t : all)
      if (t.tensor.is_sharded()) t.tensor = to_local(t.tensor.detach());
    all.push_back({"generator", generator_.state()});
    return all;
  }

 private:
  const Case& c_;
  const int64_t data_rank_;
  Generator generator_{5};
  models::GptPtr model_;
  Wrapped wrapped_;
  std::unique_ptr<optim::AdamW> optimizer_;
};

inline Case ddp(parallel::DdpOptions o) {
  Case c;
  c.wrap = [o](models::Gpt& m) -> Wrapped {
    std::shared_ptr<parallel::Reducer> r = parallel::make_reducer(m, o);
    return {r, [r](bool on) { r->set_sync(on); }};
  };
  return c;
}

inline Case fsdp(parallel::FsdpOptions o, std::vector<MeshAxis> mesh = {{"dp", 2}}) {
  Case c;
  c.ranks = 1;
  for (const MeshAxis& axis : mesh) c.ranks *= axis.size;
  c.wrap = [o, mesh](models::Gpt& m) -> Wrapped {
    parallel::FsdpOptions own = o;  // of this rank's thread
    own.mesh = init_device_mesh(mesh);
    auto fsdp = parallel::fully_shard(m, own);
    return {fsdp, [fsdp](bool on) { fsdp->set_sync(on); }};
  };
  return c;
}

inline Case tensor_parallel(bool sequence) {
  Case c;
  c.mesh = {{"dp", 1}, {"tp", 2}};
  c.data_axis = "dp";
  c.wrap = [sequence](models::Gpt& m) -> Wrapped {
    DeviceMesh mesh = init_device_mesh({{"tp", 2}});
    parallel::parallelize_module(m, mesh, models::tensor_parallel_plan(m.options, sequence));
    return {};
  };
  return c;
}

inline Case fsdp_with_tensor_parallel(bool tree) {
  Case c;
  c.ranks = 4;
  c.mesh = {{"dp", 2}, {"tp", 2}};
  c.data_axis = "dp";
  c.wrap = [mesh_of = c.mesh, tree](models::Gpt& m) -> Wrapped {
    DeviceMesh mesh = init_device_mesh(mesh_of);
    parallel::parallelize_module(m, mesh["tp"], models::tensor_parallel_plan(m.options));
    return {parallel::fully_shard(m, {.mesh = mesh["dp"], .tree_accumulation = tree})};
  };
  c.micro_batches = tree ? 2 : 1;
  c.sync_each = true;
  return c;
}

}  // namespace tessera::test::wrapped
