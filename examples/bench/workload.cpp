#include "examples/bench/workload.h"

#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/views.h"
#include "core/tensor/random.h"
#include "examples/models/bert.h"
#include "examples/models/gpt.h"
#include "examples/models/mlp.h"
#include "examples/models/resnet.h"

namespace tessera::bench {
namespace {

constexpr int kBatches = 4;

template <class Options>
void apply_settings(Options& model, const std::vector<std::string>& settings) {
  for (const std::string& s : settings) {
    size_t eq = s.find('=');
    TESSERA_CHECK(eq != std::string::npos && eq > 0, "bench: --set \"{}\": expected key=value", s);
    models::set_option(model, s.substr(0, eq), s.substr(eq + 1));
  }
}

}  // namespace

Workload::Workload(const WorkloadOptions& o, Ref<ProcessGroup> group) : precision_(o.precision) {
  TESSERA_CHECK(o.batch_size >= 0, "bench: --batch-size {}: expected at least 1", o.batch_size);
  TESSERA_CHECK(o.seq_len >= 0, "bench: --seq-len {}: expected at least 1", o.seq_len);
  manual_seed(o.seed);
  if (o.model == "gpt-nano" || o.model == "gpt2")
    make_gpt(o);
  else if (o.model.starts_with("bert-"))
    make_bert(o);
  else if (o.model.starts_with("resnet"))
    make_resnet(o);
  else if (o.model == "mlp")
    make_mlp(o);
  else
    throw UserError(fmt::format(
        "bench: unknown model \"{}\"; expected gpt-nano, gpt2, bert-mini, bert-base, bert-large, "
        "resnet18, resnet34, resnet50 or mlp",
        o.model));
  if (group && o.fsdp)
    parallel::fully_shard(*model_, {.mesh = init_device_mesh({{"dp", group->size()}}, group)});
  make_optimizer(o);
  if (group && !o.fsdp) reducer_ = parallel::make_reducer(*model_, {.group = std::move(group)});
  if (o.compile)
    compiled_ = std::make_unique<compiler::Compiled<Step>>(
        [this](const Tensor& inputs, const Tensor& targets) {
          return train_on({inputs, targets});
        },
        compiler::CompileOptions{.name = o.model, .names = model_->named_parameters()});
}

void Workload::make_gpt(const WorkloadOptions& o) {
  models::GptOptions m = o.model == "gpt2" ? models::gpt2() : models::gpt_nano();
  apply_settings(m, o.set);
  int64_t length = o.seq_len ? o.seq_len : m.context;
  TESSERA_CHECK(length <= m.context, "bench: --seq-len {} is longer than the model's context {}",
                length, m.context);
  batch_ = o.batch_size ? o.batch_size : o.model == "gpt2" ? 1 : 12;
  tokens_ = batch_ * length;
  auto gpt = models::gpt(m);
  model_ = gpt;
  loss_ = [gpt](const Batch& b) { return gpt->loss(b.inputs, b.targets); };
  for (int i = 0; i < kBatches; ++i)
    batches_.push_back(
        {randint(0, m.vocab, {batch_, length}), randint(0, m.vocab, {batch_, length})});
}

void Workload::make_bert(const WorkloadOptions& o) {
  models::BertOptions m = models::bert_options(o.model);
  m.dropout = m.attention_dropout = 0;
  apply_settings(m, o.set);
  int64_t length = o.seq_len ? o.seq_len : 128;
  TESSERA_CHECK(length <= m.context, "bench: --seq-len {} is longer than the model's context {}",
                length, m.context);
  batch_ = o.batch_size ? o.batch_size : 8;
  tokens_ = batch_ * length;
  auto bert = models::bert_for_masked_lm(m);
  model_ = bert;
  loss_ = [bert](const Batch& b) { return cross_entropy((*bert)(b.inputs), b.targets); };
  for (int i = 0; i < kBatches; ++i) {
    Tensor ids = randint(0, m.vocab, {batch_, length});
    Tensor chosen = lt(rand({batch_, length}), 0.15);
    batches_.push_back({ids, where(chosen, ids, full_like(ids, -100))});
  }
}

/// Images of 224 x 224, channels-last.
void Workload::make_resnet(const WorkloadOptions& o) {
  models::ResNetOptions m;
  TESSERA_CHECK(o.model == "resnet18" || o.model == "resnet34" || o.model == "resnet50",
                "bench: unknown model \"{}\"; expected resnet18, resnet34 or resnet50", o.model);
  m.depth = o.model == "resnet18" ? 18 : o.model == "resnet34" ? 34 : 50;
  apply_settings(m, o.set);
  TESSERA_CHECK(o.seq_len == 0, "bench: --seq-len {}: images have no sequences; leave it out",
                o.seq_len);
  batch_ = o.batch_size ? o.batch_size : 8;
  auto resnet = models::resnet(m);
  model_ = resnet;
  loss_ = [resnet](const Batch& b) { return resnet->loss(b.inputs, b.targets); };
  for (int i = 0; i < 2; ++i)
    batches_.push_back({contiguous(randn({batch_, 3, 224, 224}), MemoryFormat::kChannelsLast),
                        randint(0, m.classes, {batch_})});
}

void Workload::make_mlp(const WorkloadOptions& o) {
  models::MlpOptions m;
  apply_settings(m, o.set);
  TESSERA_CHECK(o.seq_len == 0, "bench: --seq-len {}: the mlp has no sequences; leave it out",
                o.seq_len);
  batch_ = o.batch_size ? o.batch_size : 128;
  auto mlp = models::mlp(m);
  model_ = mlp;
  loss_ = [mlp](const Batch& b) { return mlp->loss(b.inputs, b.targets); };
  for (int i = 0; i < kBatches; ++i)
    batches_.push_back({randn({batch_, m.in}), randint(0, m.out, {batch_})});
}

/// SGD with momentum for images, AdamW for the others.
void Workload::make_optimizer(const WorkloadOptions& o) {
  if (o.model.starts_with("resnet"))
    optimizer_ = std::make_unique<optim::SGD>(
        model_->parameters(), optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 1e-4});
  else
    optimizer_ =
        std::make_unique<optim::AdamW>(optim::decay_matrices_only(model_->named_parameters(), 0.1),
                                       optim::AdamWOptions{.lr = 1e-3, .betas = {0.9, 0.99}});
}

std::vector<NamedTensor> Workload::state() const {
  std::vector<NamedTensor> all;
  for (NamedTensor& t : model_->state()) all.push_back({"model." + t.name, t.tensor});
  for (NamedTensor& t : optimizer_->named_state()) all.push_back({"optimizer." + t.name, t.tensor});
  return all;
}

double Workload::step() {
  if (!compiled_) return train().item<double>();
  const Batch& batch = next_batch();
  return (*compiled_)(batch.inputs, batch.targets).item<double>();
}

Tensor Workload::train() { return train_on(next_batch()); }

Tensor Workload::train_on(const Batch& batch) {
  Tensor loss;
  {
    Autocast scope(precision_);
    loss = loss_(batch);
  }
  backward(loss);
  optim::Clip clip = optim::clip_grad_norm(optimizer_->parameters(), 1.0);
  optimizer_->step(clip.scale);
  optimizer_->zero_grad();
  return loss.detach();
}

}  // namespace tessera::bench
