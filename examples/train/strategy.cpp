#include "examples/train/strategy.h"

#include <algorithm>
#include <map>

#include "core/autograd/autograd.h"
#include "core/io/hash.h"
#include "core/io/safetensors.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/sort.h"
#include "core/ops/views.h"
#include "dtensor/dtensor.h"
#include "parallel/ddp.h"
#include "parallel/fsdp.h"
#include "parallel/pipeline.h"
#include "parallel/sync_batch_norm.h"
#include "parallel/tensor_parallel.h"

namespace tessera::train {
namespace {

// The axes of each strategy; those that replicate the model or share a batch come first.
const std::map<std::string, std::vector<std::string>> kAxes = {
    {"ddp", {"dp"}}, {"fsdp", {"dp"}},          {"hsdp", {"replicate", "shard"}},
    {"tp", {"tp"}},  {"fsdp+tp", {"dp", "tp"}}, {"hsdp+tp", {"replicate", "shard", "tp"}},
    {"pp", {"pp"}},
};

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& n : names) text += (text.empty() ? "" : ",") + n + "=N";
  return text;
}

DeviceMesh make_mesh(const Options& o, const Ref<ProcessGroup>& group) {
  const std::vector<std::string>& names = kAxes.at(o.strategy);
  std::vector<MeshAxis> axes;
  if (!o.mesh.empty()) {
    axes = parse_mesh(o.mesh);
  } else {
    TESSERA_CHECK(names.size() == 1, "train: --strategy {} needs --mesh {}", o.strategy,
                  listed(names));
    axes = {{names[0], group->size()}};
  }
  bool same = std::ranges::equal(axes, names, {}, &MeshAxis::name);
  if (o.strategy == "pp" && axes.size() == 2)  // each stage replicated
    same = axes[0].name == "dp" && axes[1].name == "pp";
  TESSERA_CHECK(same, "train: --mesh {} for --strategy {}; expected {}{}", o.mesh, o.strategy,
                listed(names), o.strategy == "pp" ? " or dp=N,pp=N" : "");
  // With one data-parallel coordinate, micro-batches must still be summed in the tree, which
  // fully_shard does.
  if (o.strategy == "tp" && o.deterministic) axes.insert(axes.begin(), {"dp", 1});
  return init_device_mesh(axes, group);
}

class Ddp final : public Strategy {
 public:
  Ddp(const Options& o, Ref<ProcessGroup> group, Task& task) : Strategy(task) {
    data_group_ = group;
    if (o.sync_batch_norm) nn::convert_sync_batch_norm(*task.model, data_group_);
    task.fill();
    ddp_ = parallel::ddp(task.model, {.group = group, .tree_accumulation = o.deterministic});
  }
  void leave_statistics() override { ddp_->leave_buffers(); }
  double communication_ms() override { return ddp_->communication_ms(); }

 private:
  void set_sync(bool sync) override { ddp_->set_sync(sync); }
  std::shared_ptr<parallel::Ddp> ddp_;
};

// Cuts parameters over data-parallel axes, a tensor-parallel axis, or both.
class Sharded final : public Strategy {
 public:
  Sharded(const Options& o, const Ref<ProcessGroup>& group, Task& task)
      : Strategy(task), mesh_(make_mesh(o, group)), offload_(o.offload) {
    bool tp = mesh_.has_axis("tp");
    std::vector<std::string> dp = mesh_.axes();
    if (tp) dp.pop_back();
    // Neighbours on the last data-parallel axis hold neighbouring leaves of the tree of sums.
    int index = 0;
    for (const std::string& axis : dp) index = index * mesh_.size(axis) + mesh_.coordinate(axis);
    data_group_ = tp ? group->split(mesh_.coordinate("tp"), index) : group;
    if (o.sync_batch_norm) nn::convert_sync_batch_norm(*task.model, data_group_);
    if (tp) cut_model(o, task);
    if (!dp.empty()) {
      // Every micro-batch is reduced, so fully_shard does not know which is a step's last one.
      fsdp_ = parallel::fully_shard(task.model, {.mesh = mesh_.slice(dp),
                                                 .groups = task.spec->fsdp_groups,
                                                 .offload = o.offload,
                                                 .tree_accumulation = o.deterministic,
                                                 .sync_buffers = false});
    } else {
      parallel::materialize(*task.model);
    }
    ReplicatePlain weights_are_read_by_all;
    task.fill();
    statistics_ = std::make_unique<parallel::RunningStatistics>(*task.model, data_group_, false);
  }
  data::Deal deal() const override { return data::Deal::kReduceThenAccumulate; }
  bool collective_forward() const override { return true; }
  double communication_ms() override { return fsdp_ ? fsdp_->communication_ms() : 0; }
  std::string memory() const override {
    if (!fsdp_ || data_group_->size() == 1) return {};
    parallel::FsdpMemory m = fsdp_->memory();
    auto mib = [](int64_t bytes) { return double(bytes) / double(1 << 20); };
    return fmt::format(
        "fully sharded: {:.1f} MiB of parameters {}; at most {:.1f} MiB of whole weights "
        "and {:.1f} MiB of whole gradients at a time",
        mib(m.sharded), offload_ ? "of this rank in memory of the host" : "on this rank",
        mib(m.gathered_peak), mib(m.gradients_peak));
  }

 private:
  void cut_model(const Options& o, Task& task) {
    const models::TensorParallel& cut = task.spec->tensor_parallel;
    TESSERA_CHECK(cut.plan, "train: --strategy {}: --model {} has no tensor-parallel plan",
                  o.strategy, o.model);
    TESSERA_CHECK(!o.exact_contraction || cut.inexact.empty(),
                  "train: --exact-contraction with --strategy {} and --model {}: {}. Leave "
                  "--exact-contraction out; results are then those of one rank up to rounding",
                  o.strategy, o.model, cut.inexact);
    if (!cut.field.empty()) {
      const int64_t has = task.options.integer(cut.field);
      const int ranks = mesh_.size("tp");
      TESSERA_CHECK(has >= ranks,
                    "train: --strategy {}: {} {} cannot be cut over tp={}; give --set {}={} or "
                    "fewer ranks in --mesh",
                    o.strategy, has, cut.parts, ranks, cut.field, ranks);
    }
    parallel::parallelize_module(*task.model, mesh_["tp"], cut.plan(task.options));
  }

  DeviceMesh mesh_;
  const bool offload_;
  std::shared_ptr<parallel::Fsdp> fsdp_;
};

// Puts stages of the model on the ranks of "pp"; with "dp", each stage is replicated over it.
class Staged final : public Strategy {
 public:
  Staged(const Options& o, const Ref<ProcessGroup>& group, Task& task)
      : Strategy(task), mesh_(make_mesh(o, group)) {
    TESSERA_CHECK(!o.deterministic,
                  "train: --deterministic with --strategy pp: stages add up micro-batches as they "
                  "come back, and the norm stage by stage, while other strategies keep one tree of "
                  "sums; rounding differs. Leave --deterministic out");
    stage_ = stage_of(o, task);
    parallel::materialize(*stage_);
    fill(o);
    task.model = stage_;
    bool replicated = mesh_.has_axis("dp");
    data_group_ = replicated ? mesh_.group("dp") : group->split(group->rank());
    if (o.sync_batch_norm) nn::convert_sync_batch_norm(*stage_, data_group_);
    statistics_ = std::make_unique<parallel::RunningStatistics>(*stage_, data_group_, true);
    parallel::PipelineOptions p{.mesh = mesh_["pp"], .statistics = statistics_.get()};
    if (const auto& tied = task.spec->pipeline.tied) p.tied = tied(task.options);
    if (replicated) {
      auto ddp = parallel::ddp(stage_, {.group = data_group_, .sync_buffers = false});
      p.set_sync = [ddp](bool on) { ddp->set_sync(on); };
    }
    pipeline_ = std::make_unique<parallel::Pipeline>(stage_, p);
  }

  Tensor run_step(const std::vector<data::Batch>& batches, const Tensor& key,
                  const optim::GradScaler& scaler) override {
    default_generator().seek(key);
    Tensor losses = pipeline_->step(micro_batches(batches), [&](const Tensor& y, const Tensor& t) {
      return scaler.scale(task_.loss(y, t));
    });
    return scaler.enabled() ? losses * cast(scaler.inverse_scale(), losses.dtype()) : losses;
  }
  Evaluation evaluate(const data::Batch& batch) override {
    if (!task_.classifies)
      return {pipeline_->evaluate(micro_batches({batch}), task_.loss).item<double>(), batch.rows()};
    Evaluation e;
    pipeline_->evaluate(micro_batches({batch}), [&](const Tensor& logits, const Tensor& targets) {
      e = judge(logits, targets);
      return scalar_tensor(e.loss, kF64);
    });
    Tensor facts = from_values<double>({e.loss, double(e.counted), double(e.right)}, {3});
    pipeline_->group().broadcast(facts, pipeline_->stages() - 1);  // only the last stage has logits
    const double* f = facts.data<double>();
    return {f[0], int64_t(f[1]), int64_t(f[2])};
  }
  optim::Clip clip(optim::Optimizer&, double max_norm, const Tensor& grad_scale) override {
    return pipeline_->clip_grad_norm(max_norm, grad_scale);
  }
  int64_t num_parameters() override { return pipeline_->parameters().num_parameters(); }
  std::string params_hash() override { return io::params_xxh128(pipeline_->parameters().gather()); }
  std::vector<NamedTensor> gather_state(ProcessGroup&) override {
    return pipeline_->parameters().gather_state();
  }
  double communication_ms() override { return pipeline_->communication_ms(); }

 private:
  static std::vector<parallel::MicroBatch> micro_batches(const std::vector<data::Batch>& batches) {
    std::vector<parallel::MicroBatch> out;
    for (const data::Batch& b : batches)
      out.push_back({.input = b.inputs, .target = b.targets, .samples = b.sample_numbers});
    return out;
  }
  // Makes this rank's stage, without values.
  std::shared_ptr<nn::Module> stage_of(const Options& o, const Task& task) const {
    const models::PipelineCut& cut = task.spec->pipeline;
    TESSERA_CHECK(cut.stage, "train: --strategy pp: --model {} has no stages", o.model);
    const int stages = mesh_.size("pp");
    const int64_t has = cut.places(task.options);
    TESSERA_CHECK(has >= stages,
                  "train: --strategy pp: {} {} cannot be cut into pp={} stages; give {} or "
                  "fewer ranks in --mesh",
                  has, cut.parts, stages, cut.remedy(stages));
    nn::OnDevice meta(kMeta);
    std::shared_ptr<nn::Module> stage = cut.stage(task.options, mesh_.coordinate("pp"), stages);
    use_fp8(*stage, o);
    return stage;
  }
  // Fills this stage with values: those drawn for the whole model, or its part of a file.
  void fill(const Options& o) {
    if (o.weights.empty())
      stage_->init(o.seed);
    else
      load_weights(*stage_, o, true);
  }

  DeviceMesh mesh_;
  std::shared_ptr<nn::Module> stage_;
  std::unique_ptr<parallel::Pipeline> pipeline_;
};

}  // namespace

bool shards_parameters(const Options& o) { return o.strategy != "ddp"; }

namespace {

void recompute_blocks(nn::Module& model, const Options& o) {
  if (o.recompute == "none") return;
  auto blocks = nn::numbered_modules(model);
  TESSERA_CHECK(!blocks.empty(), "train: --recompute {}: --model {} has no numbered blocks",
                o.recompute, o.model);
  for (auto& [path, block] : blocks)
    block->recompute(o.recompute == "selective" ? keeping_products() : RecomputeOptions{});
}

std::unique_ptr<Strategy> make_plain(const Options& o, Ref<ProcessGroup> group, Task& task) {
  if (o.strategy == "pp") return std::make_unique<Staged>(o, group, task);
  if (shards_parameters(o)) return std::make_unique<Sharded>(o, group, task);
  if (!o.mesh.empty()) make_mesh(o, group);  // checks the mesh, which is not needed otherwise
  return std::make_unique<Ddp>(o, std::move(group), task);
}

}  // namespace

std::unique_ptr<Strategy> make_strategy(const Options& o, Ref<ProcessGroup> group, Task& task) {
  TESSERA_CHECK(kAxes.contains(o.strategy), "train: unknown strategy \"{}\"", o.strategy);
  std::unique_ptr<Strategy> strategy = make_plain(o, std::move(group), task);
  recompute_blocks(*task.model, o);
  return strategy;
}

// ---- the defaults of a strategy

Tensor Strategy::loss_of(const data::Batch& batch) {
  Tensor prediction = (*task_.model)(batch.inputs);
  LossParallel spread_vocabulary;  // for the loss alone: other ops must not communicate
  return task_.loss(prediction, batch.targets);
}

Tensor Strategy::run_step(const std::vector<data::Batch>& batches, const Tensor& key,
                          const optim::GradScaler& scaler) {
  std::vector<Tensor> losses;
  for (size_t k = 0; k < batches.size(); ++k) {
    SampleScope samples(batches[k].sample_numbers);
    default_generator().seek(key);
    set_sync(k + 1 == batches.size());
    if (statistics_) statistics_->before(k, batches.size());
    Tensor loss = loss_of(batches[k]);
    if (statistics_) statistics_->after(k, batches.size());
    Tensor root = scaler.scale(loss);
    backward(batches.size() > 1 ? root * (1.0 / double(batches.size())) : root);
    losses.push_back(full_tensor(loss.detach()).to(kF64));
  }
  return stack(losses);
}

Evaluation Strategy::evaluate(const data::Batch& batch) {
  InferenceMode off;
  if (!task_.classifies) return {loss_of(batch).item<double>(), batch.rows()};
  return judge(full_tensor((*task_.model)(batch.inputs)), batch.targets);
}

Evaluation Strategy::judge(const Tensor& logits, const Tensor& targets) const {
  const Tensor right = eq(argmax(logits, 1), targets).to(kI64);
  Evaluation out{.counted = sum(ge(targets, 0).to(kI64)).item<int64_t>(),
                 .right = sum(right).item<int64_t>()};
  if (out.counted > 0) out.loss = task_.validation_loss(logits, targets).item<double>();
  return out;
}

optim::Clip Strategy::clip(optim::Optimizer& optimizer, double max_norm, const Tensor& grad_scale) {
  return optim::clip_grad_norm(optimizer.parameters(), max_norm, {.grad_scale = grad_scale});
}

int64_t Strategy::num_parameters() { return task_.model->num_parameters(); }

std::string Strategy::params_hash() {
  std::vector<NamedTensor> params = task_.model->named_parameters();
  std::ranges::sort(params, {}, &NamedTensor::name);
  io::ParamsHasher hasher;
  for (const NamedTensor& p : params) hasher.add(p.name, full_tensor(p.tensor.detach()));
  return hasher.hex();
}

std::vector<NamedTensor> Strategy::gather_state(ProcessGroup& group) {
  std::vector<NamedTensor> whole;
  for (NamedTensor& t : task_.model->state()) {
    Tensor full = full_tensor(t.tensor.detach());
    if (group.rank() == 0) whole.push_back({t.name, full});
  }
  return whole;
}

}  // namespace tessera::train
