#include "examples/bench/workload.h"

#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/views.h"
#include "core/tensor/random.h"

namespace tessera::bench {
namespace {

constexpr int kBatches = 4, kBatchesOfImages = 2;
constexpr int64_t kSide = 224;  // of images

// The options of a registry row with those of --set; dropout is off unless --set says otherwise.
models::ModelOptions options_of(const models::ModelSpec& spec,
                                const std::vector<std::string>& set) {
  models::ModelOptions options = spec.options;
  for (const auto& [key, value] : options.texts())
    if (key.ends_with("dropout")) options.set(key, "0");
  for (const std::string& s : set) {
    size_t eq = s.find('=');
    TESSERA_CHECK(eq != std::string::npos && eq > 0, "bench: --set \"{}\": expected key=value", s);
    options.set(s.substr(0, eq), s.substr(eq + 1));
  }
  return options;
}

}  // namespace

Workload::Workload(const WorkloadOptions& o, Ref<ProcessGroup> group) : precision_(o.precision) {
  TESSERA_CHECK(o.batch_size >= 0, "bench: --batch-size {}: expected at least 1", o.batch_size);
  TESSERA_CHECK(o.seq_len >= 0, "bench: --seq-len {}: expected at least 1", o.seq_len);
  const models::ModelSpec& spec = models::find_model("bench", o.model);
  const models::ModelOptions options = options_of(spec, o.set);
  manual_seed(o.seed);
  batch_ = o.batch_size ? o.batch_size : spec.bench_batch_size;
  model_ = spec.make(options);
  loss_ = models::loss_of(spec);
  make_batches(spec, options, o.seq_len);
  if (group && o.fsdp)
    parallel::fully_shard(*model_, {.mesh = init_device_mesh({{"dp", group->size()}}, group),
                                    .groups = spec.fsdp_groups});
  make_optimizer(spec);
  if (group && !o.fsdp) parallel::ddp(model_, {.group = std::move(group)});
  if (o.compile)
    compiled_ = std::make_unique<compiler::Compiled<Step>>(
        compile(Step([this](const Tensor& inputs, const Tensor& targets) {
                  return train_on({inputs, targets});
                }),
                {.name = o.model, .names = model_->named_parameters()}));
}

/// Draws random values; images are channels-last.
void Workload::make_batches(const models::ModelSpec& spec, const models::ModelOptions& options,
                            int64_t seq_len) {
  const bool masked = spec.data == models::Data::kMaskedText;
  if (masked || spec.data == models::Data::kText) {
    const int64_t vocab = options.integer("vocab"), context = options.integer("context"),
                  usual = spec.length ? std::min(spec.length, context) : context,
                  length = seq_len ? seq_len : usual;
    TESSERA_CHECK(length <= context, "bench: --seq-len {} is longer than the model's context {}",
                  length, context);
    tokens_ = batch_ * length;
    for (int i = 0; i < kBatches; ++i) {
      Tensor ids = randint(0, vocab, {batch_, length});
      batches_.push_back(
          {ids, masked ? where(lt(rand({batch_, length}), 0.15), ids, full_like(ids, -100))
                       : randint(0, vocab, {batch_, length})});
    }
    return;
  }
  TESSERA_CHECK(seq_len == 0, "bench: --seq-len {}: {} has no sequences; leave it out", seq_len,
                spec.name);
  if (spec.data == models::Data::kImages) {
    for (int i = 0; i < kBatchesOfImages; ++i)
      batches_.push_back({contiguous(randn({batch_, 3, kSide, kSide}), MemoryFormat::kChannelsLast),
                          randint(0, options.integer("classes"), {batch_})});
  } else {
    for (int i = 0; i < kBatches; ++i)
      batches_.push_back(
          {randn({batch_, options.integer("in")}), randint(0, options.integer("out"), {batch_})});
  }
}

/// Makes SGD with momentum for images, AdamW for other data.
void Workload::make_optimizer(const models::ModelSpec& spec) {
  if (spec.data == models::Data::kImages)
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

Tensor Workload::enqueue() {
  if (!compiled_) return train();
  const Batch& batch = next_batch();
  return (*compiled_)(batch.inputs, batch.targets);
}

void Workload::check_replayed(std::string_view command) const {
  TESSERA_CHECK(compile_report().replays > 0, "bench {}: --compile: the step is not replayed: {}",
                command, compile_report().why_not);
}

Tensor Workload::train() { return train_on(next_batch()); }

Tensor Workload::train_on(const Batch& batch) {
  Tensor loss;
  {
    Autocast scope(precision_);
    loss = loss_((*model_)(batch.inputs), batch.targets);
  }
  backward(loss);
  optim::Clip clip = optim::clip_grad_norm(optimizer_->parameters(), 1.0);
  optimizer_->step(clip.scale);
  optimizer_->zero_grad();
  return loss.detach();
}

}  // namespace tessera::bench
