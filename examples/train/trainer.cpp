#include "examples/train/trainer.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "collectives/ops.h"
#include "compile/compile.h"
#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/base/deterministic.h"
#include "core/base/isa.h"
#include "core/base/spelling.h"
#include "core/data/loader.h"
#include "core/data/token_dataset.h"
#include "core/dispatch/context.h"
#include "core/dispatch/default_device.h"
#include "core/io/safetensors.h"
#include "core/nn/nonfinite.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"
#include "core/optim/optim.h"
#include "core/tensor/device_runtime.h"
#include "core/tensor/random.h"
#include "examples/train/agreement.h"
#include "examples/train/checkpointing.h"
#include "examples/train/outputs.h"
#include "examples/train/profiling.h"
#include "examples/train/report.h"
#include "examples/train/stop.h"
#include "examples/train/strategy.h"
#include "parallel/checkpoint/exchange.h"
#include "parallel/fp8.h"

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point t) {
  return std::chrono::duration<double>(Clock::now() - t).count();
}

// The number of keys for the dropout of a step, which starts at a multiple of it.
constexpr int64_t kKeysPerStep = int64_t(1) << 20;

bool power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

data::SamplerOptions sampler_options(const Options& o, const Task& task, const Strategy& strategy) {
  ProcessGroup& group = strategy.data_group();
  int64_t world = group.size(),
          micro_batches = o.deterministic ? o.logical_batches : world * o.accumulate;
  if (o.deterministic) {
    TESSERA_CHECK(
        power_of_two(world) && power_of_two(micro_batches) && micro_batches % world == 0,
        "train: --deterministic with {} data-parallel ranks and --logical-batches {}: both must be "
        "powers of two, the first dividing the second",
        world, micro_batches);
  }
  TESSERA_CHECK(
      o.batch_size % micro_batches == 0,
      "train: --batch-size {} does not divide into {} micro-batches ({}); choose a multiple",
      o.batch_size, micro_batches,
      o.deterministic ? "--logical-batches"
                      : fmt::format("{} ranks x --accumulate {}", world, o.accumulate));
  return {.dataset_size = task.train->size(),
          .micro_batches = micro_batches,
          .micro_batch_size = o.batch_size / micro_batches,
          .rank = group.rank(),
          .world_size = int(world),
          .seed = o.seed,
          .repeat = true,
          .deal = strategy.deal()};
}

int64_t total_steps(const Options& o, const Task& task) {
  if (o.steps >= 0) return o.steps;
  if (o.epochs == 0) return 1000;
  TESSERA_CHECK(task.train->size() > 0 || task.validation,
                "train: --epochs needs a data set that ends; give --steps");
  // Random windows never end, so an epoch is as many tokens as the training split has.
  auto* windows = dynamic_cast<const data::RandomWindows*>(task.train.get());
  int64_t items = windows ? windows->num_windows() : task.train->size();
  const double steps = o.epochs * double(items) / double(o.batch_size);
  TESSERA_CHECK(steps < 1e15, "train: --epochs {}: that is {} steps; give fewer", o.epochs, steps);
  return std::max<int64_t>(1, int64_t(steps));
}

std::unique_ptr<optim::Optimizer> make_optimizer(const Options& o, nn::Module& model) {
  auto params = optim::decay_matrices_only(model.named_parameters(), o.weight_decay);
  if (o.optimizer == "sgd")
    return std::make_unique<optim::SGD>(params, optim::SGDOptions{.lr = o.lr,
                                                                  .momentum = o.momentum,
                                                                  .weight_decay = o.weight_decay,
                                                                  .nesterov = o.nesterov});
  if (o.optimizer == "rmsprop")
    return std::make_unique<optim::RMSprop>(params, optim::RMSpropOptions{.lr = o.lr});
  if (o.optimizer == "adagrad")
    return std::make_unique<optim::Adagrad>(params, optim::AdagradOptions{.lr = o.lr});
  if (o.optimizer == "lion")
    return std::make_unique<optim::Lion>(
        params, optim::LionOptions{.lr = o.lr, .betas = {o.beta1, o.beta2}});
  return std::make_unique<optim::AdamW>(
      params,
      optim::AdamWOptions{.lr = o.lr, .betas = {o.beta1, o.beta2}, .weight_decay = o.weight_decay});
}

double tree_sum(std::span<const double> v) {
  if (v.size() <= 1) return v.empty() ? 0 : v[0];
  size_t half = (v.size() + 1) / 2;
  return tree_sum(v.first(half)) + tree_sum(v.subspan(half));
}

// Returns the mean over all micro-batches of all ranks, summed in the order of the leaves whatever
// the number of ranks.
double global_mean(const Strategy& strategy, const Tensor& mine) {
  ProcessGroup& group = strategy.data_group();
  int64_t each = mine.numel(), ranks = group.size();
  const Tensor all = all_gather(mine.cpu(), Ref<ProcessGroup>(&group));
  std::vector<double> leaves(size_t(each * ranks));
  for (int64_t r = 0; r < ranks; ++r)
    for (int64_t k = 0; k < each; ++k)
      leaves[size_t(data::dealt_leaf(strategy.deal(), r, ranks, each, k))] =
          all.values<double>()[r * each + k];
  return tree_sum(leaves) / double(leaves.size());
}

// Returns the mean loss over all positions of all windows, or over all images. Batches have one
// size and are dealt to ranks in turn, so that each has the same value whatever the number of
// ranks, and they are summed in one order. Where ranks run a forward together, a rank without a
// batch of its own repeats the first one and drops the result.
Validation validate(const Options& o, const Task& task, Strategy& strategy) {
  ProcessGroup& group = strategy.data_group();
  Autocast precision(compute_dtype(o));
  task.model->eval();
  const int64_t size = task.validation_batch, batches = (task.validation->size() + size - 1) / size;
  data::DataLoader loader(
      task.validation,
      data::DistributedSampler({.dataset_size = task.validation->size(),
                                .micro_batches = group.size(),
                                .micro_batch_size = size,
                                .rank = group.rank(),
                                .world_size = group.size(),
                                .shuffle = false}),
      {.workers = o.workers, .timeout_ms = group.timeout().count(), .device = default_device()});
  std::vector<double> facts(size_t(3 * batches),
                            0);  // by batch: sum of losses, counted, right
  int64_t b = group.rank();
  for (auto batch = loader.next(); batch; batch = loader.next(), b += group.size()) {
    const bool mine = batch->rows() > 0;
    if (!mine && !strategy.collective_forward()) break;
    if (!mine) {
      batch = task.validation->allocate(1);
      batch->sample_numbers = zeros({1}, {.dtype = kI64, .device = kCPU});
      task.validation->read({0, 0}, 0, *batch);
      batch = batch->to(default_device());
    }
    const Evaluation e = strategy.evaluate(*batch);
    if (!mine) continue;
    facts[size_t(b)] = e.loss * double(e.counted);
    facts[size_t(batches + b)] = double(e.counted);
    facts[size_t(2 * batches + b)] = double(e.right);
  }
  task.model->train();
  Tensor all = from_values<double>(facts, {3 * batches});
  group.all_reduce(all);  // each entry is the number of one rank and zero on the others
  auto total = [&](int64_t fact) {
    return tree_sum({all.data<double>() + fact * batches, size_t(batches)});
  };
  TESSERA_CHECK(total(1) > 0, "train: none of the {} images that validate can be read",
                task.validation->size());
  Validation out{.loss = total(0) / total(1)};
  if (task.classifies) out.accuracy = total(2) / total(1);
  return out;
}

void save(const Options& o, const Task& task, std::vector<NamedTensor> state) {
  std::erase_if(state, [](const NamedTensor& t) { return nn::is_fp8_history(t.name); });
  io::Metadata metadata;
  for (auto& [key, value] : task.metadata) metadata.emplace(key, value);
  if (saves_folder(o)) return task.spec->folder.write(task.options, o.save, state, metadata);
  io::save_safetensors(o.save, state, metadata);
}

// If no rank holds the whole model, the text is generated by a copy made for it.
std::string generate(const Options& o, const Task& task, const std::vector<NamedTensor>& state) {
  if (!shards_parameters(o)) return task.generate(o.sample);
  Task copy = make_task(o);
  copy.model->load_state(state);
  return copy.generate(o.sample);
}

// Says what computes the products of a run in mixed precision on the CPU.
std::string precision_story(const Options& o, Device device) {
  if (!device.is_cpu()) return "";
  switch (compute_dtype(o)) {
    case kBF16:
      return cpu::has_bf16_dot() ? ", products by bf16 dot instructions"
                                 : ", products of bf16 computed in fp32: this CPU has no others";
    case kF16: return ", products of fp16 computed in fp32, as on every CPU";
    default: return "";
  }
}

class Trainer {
 public:
  Trainer(const Options& o, Ref<ProcessGroup> group)
      : o_(o),
        group_(std::move(group)),
        agreement_(o, group_),
        device_(device_of(o)),
        on_device_(device_),
        task_(agreement_.on(make_task(o, shards_parameters(o) ? kMeta : device_))),
        steps_(total_steps(o, task_)),
        strategy_(make_strategy(o, group_, task_)),
        optimizer_(make_optimizer(o, *task_.model)),
        schedule_(optim::schedule(o.schedule, {.lr = o.lr,
                                               .min_lr = o.min_lr,
                                               .steps = std::max<int64_t>(steps_, 1),
                                               .warmup = o.warmup})),
        loader_(task_.train, data::DistributedSampler(sampler_options(o, task_, *strategy_)),
                {.workers = o.workers, .timeout_ms = group_->timeout().count(), .device = device_}),
        scaler_({.enabled = compute_dtype(o) == kF16}),
        checkpointing_(o, task_, *group_, *optimizer_, scaler_, loader_, agreement_),
        done_(checkpointing_.resume()),
        report_(group_->rank() == 0, o.metrics, o.tensorboard, steps_, done_),
        profiling_(o.profile, *group_, device_, done_, steps_) {}

  // Returns the signal that ended the run, 0 if it was completed.
  int run() {
    tell_beginning();
    checkpointing_.compare_replicas(done_);
    auto start = Clock::now();
    for (int64_t s = done_; s < steps_; ++s) {
      profiling_.before_step(s);
      step(s);
      if (std::string text = profiling_.after_step(s); !text.empty()) report_.line(text);
      if (o_.save_every > 0 && (s + 1) % o_.save_every == 0) finish_pending();
      if (std::string warning = checkpointing_.after_step(s + 1); !warning.empty())
        report_.line("warning: " + warning);
      if (const int signal = stop_.agreed(*group_)) return stopped(signal, s + 1);
      if (task_.validation && o_.eval_every > 0 && (s + 1) % o_.eval_every == 0 && s + 1 < steps_) {
        finish_pending();
        report_.validation(s + 1, validate(o_, task_, *strategy_));
      }
    }
    finish_pending();
    checkpointing_.compare_replicas(std::max(steps_, done_));
    std::optional<Validation> validation;
    if (task_.validation) validation = validate(o_, task_, *strategy_);
    TESSERA_CHECK(!validation || std::isfinite(validation->loss),
                  "train: after the last step, {}, the validation loss is {}: nothing is saved. {}",
                  std::max(steps_, done_), validation->loss, calmer());
    report_.done({.steps = std::max(steps_, done_),
                  .seconds = seconds_since(start),
                  .validation = validation,
                  .params_xxh128 = strategy_->params_hash()});
    if (task_.skipped) tell_skipped();
    if (std::string line = strategy_->memory(); !line.empty()) report_.line(line);
    if (std::string line = agreement_.story(); !line.empty()) report_.line(line);
    if (o_.compile) report_.line(compiled_story());
    save_all();
    return 0;
  }

 private:
  void tell_beginning() {
    const char* made_up = o_.data.empty()                    ? " of random values (no --data)"
                          : o_.data.starts_with("synthetic") ? " of random values"
                                                             : "";
    if (steps_ > 0)
      report_.line(fmt::format("{}: {} parameters, {}, {} of {} {}{}{}", o_.model,
                               strategy_->num_parameters(), counted(group_->size(), "rank"),
                               counted(steps_, "step"), o_.batch_size, task_.samples, made_up,
                               precision_story(o_, device_)));
    if (!task_.data_story.empty()) report_.line(task_.data_story);
    if (!task_.fp8_story.empty())
      report_.line(
          task_.fp8_story +
          (device_.is_cpu() ? "; this CPU computes them in fp32, slower than without --fp8" : ""));
    if (!checkpointing_.story().empty()) report_.line(checkpointing_.story());
    if (done_ > 0 && done_ >= steps_)
      report_.line(
          fmt::format("nothing is left to train: {} done, this run has {}; give more --steps",
                      counted(done_, "step"), steps_));
  }

  int stopped(int signal, int64_t done) {
    finish_pending();
    const std::string warning = checkpointing_.finish(done);
    if (!warning.empty()) report_.line("warning: " + warning);
    report_.line(
        fmt::format("stopped by signal {} ({}) after step {}, which is saved in {}; "
                    "--resume goes on from there",
                    signal, strsignal(signal), done, o_.checkpoint));
    return signal;
  }

  // If one save fails, the others are still done; the first failure is then that of the run.
  void save_all() {
    std::exception_ptr failed;
    auto attempt = [&](auto&& f) {
      try {
        f();
      } catch (const UserError& e) {
        if (failed) report_.line(fmt::format("warning: {}", e.what()));
        if (!failed) failed = std::current_exception();
      }
    };
    attempt([&] {
      const std::string warning = checkpointing_.finish(std::max(steps_, done_));
      if (!warning.empty()) report_.line("warning: " + warning);
    });
    if (!o_.save.empty() || o_.sample > 0) {
      std::vector<NamedTensor> state = strategy_->gather_state(*group_);
      group_->barrier();  // only rank 0 does the rest, which may take longer than a deadline
      if (group_->rank() == 0) {
        if (!o_.save.empty()) attempt([&] { save(o_, task_, state); });
        if (o_.sample > 0) attempt([&] { report_.line("sample:\n" + generate(o_, task_, state)); });
      }
    }
    if (failed) std::rethrow_exception(failed);
  }

  void step(int64_t s) {
    auto start = Clock::now();
    ProfileSpan span("step");
    optimizer_->set_lr(schedule_(s));
    int64_t micro_batches = loader_.sampler().micro_batches_per_rank();
    std::vector<data::Batch> batches;
    {
      ProfileSpan data("data");
      for (int64_t k = 0; k < micro_batches; ++k) batches.push_back(*loader_.next());
    }
    Step done{.number = s, .batches = std::move(batches), .start = start};
    done.key = from_values<int64_t>({s * kKeysPerStep}, {});
    std::tie(done.losses, done.norm) =
        o_.compile ? run_compiled(done.batches, done.key) : update(done.batches, done.key);
    done.communication_ms = strategy_->communication_ms();
    if (scaler_.enabled()) done.scale = scaler_.named_state().at(0).tensor.cpu();
    if (device_.is_cpu()) return finish(done, done.start);
    // To read the loss now would be to wait for the device, which would then have nothing to do.
    // The copy is enqueued, and read when the next step is enqueued too.
    done.losses = done.losses.cpu(), done.norm = done.norm.cpu();
    finish_pending(/*pause=*/false);
    pending_ = std::move(done);
  }

  // A step whose loss nobody has read yet.
  struct Step {
    int64_t number = 0;
    std::vector<data::Batch> batches;
    Tensor key = {}, losses = {}, norm = {};  // losses: of this rank's micro-batches
    Tensor scale = {};                        // of the loss, after the step; fp16 only
    Clock::time_point start;
    double communication_ms = 0;
  };

  // The time of a step on a device is that between two reports; of the last one before a pause,
  // that since it began.
  void finish_pending(bool pause = true) {
    if (std::optional<Step> step = std::exchange(pending_, std::nullopt))
      finish(*step, pause ? step->start : std::max(step->start, told_));
  }

  void finish(const Step& step, Clock::time_point since) {
    const double loss = global_mean(*strategy_, step.losses);
    const double size = step.norm.item<double>();
    if (!std::isfinite(loss))
      explain(step.number, step.batches, step.key, fmt::format("the loss is {}", loss));
    if (!std::isfinite(size) && !scaler_.enabled())
      explain(step.number, step.batches, step.key,
              fmt::format("the norm of the gradients is {}", size));
    tell(step, loss, size, since);
    told_ = Clock::now();
  }

  // Runs forward, backward and update. Returns the losses of this rank's micro-batches and the
  // gradient norm.
  std::pair<Tensor, Tensor> update(const std::vector<data::Batch>& batches, const Tensor& key) {
    Tensor losses;
    {
      Autocast precision(compute_dtype(o_));
      losses = strategy_->run_step(batches, key, scaler_);
    }
    // The norm is computed also without clipping: it decides whether there is an update.
    constexpr double kUnbounded = std::numeric_limits<double>::infinity();
    optim::Clip clip = strategy_->clip(*optimizer_, o_.clip_norm > 0 ? o_.clip_norm : kUnbounded,
                                       scaler_.inverse_scale());
    if (!scaler_.enabled()) {
      // A NaN stops the run, which explains it from the state before the step: see explain. On a
      // device the host hears of it when the next step is enqueued, which then updates nothing.
      Tensor none = scalar_tensor(std::numeric_limits<double>::quiet_NaN(), kF64);
      NoGrad off;
      Tensor finite = isfinite(clip.norm);
      if (!device_.is_cpu()) {
        finite = finite & all_finite_;
        assign_(all_finite_, finite);
      }
      optimizer_->step_if_finite(where(finite, clip.scale, none));
    } else {
      scaler_.step(*optimizer_, clip);
    }
    scaler_.update();
    optimizer_->zero_grad();
    nn::update_fp8_scales(*task_.model, Ref<ProcessGroup>(&strategy_->data_group()));
    return {losses, clip.norm};
  }

  // Runs the same step compiled; a batch is passed as its tensors.
  using BatchTensors = std::tuple<Tensor, Tensor, Tensor>;
  using Update = std::pair<Tensor, Tensor>(const std::vector<BatchTensors>&, const Tensor& key);
  std::pair<Tensor, Tensor> run_compiled(const std::vector<data::Batch>& batches,
                                         const Tensor& key) {
    std::vector<BatchTensors> tensors;
    for (const data::Batch& b : batches)
      tensors.emplace_back(b.inputs, b.targets, b.sample_numbers);
    return compiled_update_(tensors, key);
  }
  std::pair<Tensor, Tensor> update_of(const std::vector<BatchTensors>& tensors, const Tensor& key) {
    std::vector<data::Batch> batches;
    for (auto& [inputs, targets, samples] : tensors)
      batches.push_back({.inputs = inputs, .targets = targets, .sample_numbers = samples});
    return update(batches, key);
  }

  void tell_skipped() {
    Tensor skipped = scalar_tensor(task_.skipped(), kI64, kCPU);
    group_->all_reduce(skipped);
    if (int64_t n = skipped.item<int64_t>(); n > 0)
      report_.line(
          fmt::format("skipped: {} {} that could not be read, read ahead or validated "
                      "included; the log names the files",
                      n, task_.samples));
  }

  // Suggests what to try where numbers grew without bound.
  const char* calmer() const {
    return o_.clip_norm > 0 ? "Lower --lr or --clip-norm" : "Lower --lr or give --clip-norm";
  }

  std::string compiled_story() const {
    const compiler::CompileReport& r = compiled_update_.report();
    if (r.replays == 0 && !r.why_not.empty())
      return fmt::format("compiled: {}; the program runs at each step: {}",
                         counted(r.compiled, "graph"), r.why_not);
    std::string graphs = compiled_update_.graph_report();
    while (graphs.ends_with('\n')) graphs.pop_back();
    return fmt::format("compiled: {} of {} steps were replayed from {}, made in {:.2f} s\n{}",
                       r.replays, r.calls, counted(r.compiled, "graph"), r.compile_s, graphs);
  }

  // Repeats a step that went wrong op by op, on all ranks, and throws on all of them the same
  // error, which says where the first NaN or infinity came from.
  [[noreturn]] void explain(int64_t s, const std::vector<data::Batch>& batches, const Tensor& key,
                            const std::string& what) {
    std::string story;
    strategy_->leave_statistics();
    {
      nn::NonFiniteSearch search(is_collective);
      Autocast precision(compute_dtype(o_));
      strategy_->run_step(batches, key, scaler_);
      story = fmt::format("{}{}", int(search.evidence()), search.story());
    }
    std::vector<std::string> stories = checkpoint::Exchange(group_.get(), {}).all_gather(story);
    auto first = std::ranges::min_element(stories, {}, [](const std::string& t) { return t[0]; });
    if (first->size() == 1)
      throw UserError(fmt::format(
          "train: step {}: {}, but the same step run again op by op has finite numbers only{}",
          s + 1, what,
          o_.compile ? "; try it without --compile, and report it if that helps" : ""));
    throw UserError(fmt::format("train: step {}: {}; on rank {}, {}. {}, or look at that module",
                                s + 1, what, first - stories.begin(), first->substr(1), calmer()));
  }

  void tell(const Step& done, double loss, double norm, Clock::time_point start) {
    const int64_t s = done.number;
    const double elapsed = seconds_since(start);
    if (done.scale.defined() && !std::isfinite(norm))
      report_.line(fmt::format(
          "step {}: gradients were not finite, the update was skipped; the loss scale is {} now",
          s + 1, done.scale.item<float>()));
    report_.step({.step = s + 1,
                  .loss = loss,
                  .lr = schedule_(s),
                  .grad_norm = norm,
                  .step_ms = elapsed * 1e3,
                  .samples_per_s = double(o_.batch_size) / elapsed,
                  .tokens_per_s = double(o_.batch_size * task_.tokens_per_sample) / elapsed,
                  .comm_ms = done.communication_ms,
                  .peak_bytes = memory_stats(device_).peak_bytes,
                  .world_size = group_->size()});
  }

  const Options& o_;
  Ref<ProcessGroup> group_;
  Agreement agreement_;
  Device device_;
  DeviceScope on_device_;
  Task task_;
  int64_t steps_;
  std::unique_ptr<Strategy> strategy_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  optim::Schedule schedule_;
  data::DataLoader loader_;
  optim::GradScaler scaler_;  // used for fp16
  Checkpointing checkpointing_;
  int64_t done_;  // steps that a resumed run had done
  StopSignals stop_{!o_.checkpoint.empty(), group_->rank() == 0};
  Report report_;
  Profiling profiling_;
  std::optional<Step> pending_;
  // Says whether the norms of all steps were finite so far; it is where the update is computed.
  Tensor all_finite_ = full({}, true, {kBool, o_.offload ? kCPU : device_});
  Clock::time_point told_{};  // when the last step was reported
  compiler::Compiled<std::function<Update>> compiled_update_{
      [this](const std::vector<BatchTensors>& batches, const Tensor& key) {
        return update_of(batches, key);
      },
      {.name = "train", .mode = compiler::parse_compile_mode(o_.compile_mode)}};
};

}  // namespace

int run(const Options& options, Ref<ProcessGroup> group) {
  DeterministicScope any_number_of_threads(options.deterministic);
  Scoped<bool> exact(context().exact_contraction, options.exact_contraction);
  manual_seed(options.seed);
  if (group->rank() == 0) check_outputs(options);
  return Trainer(options, std::move(group)).run();
}

}  // namespace tessera::train
