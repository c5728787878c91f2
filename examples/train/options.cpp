#include "examples/train/options.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <set>

#include "collectives/store/environment.h"
#include "compile/options.h"
#include "core/base/error.h"
#include "core/base/version.h"
#include "core/tensor/device_runtime.h"
#include "examples/models/registry.h"
#include "examples/train/option_table.h"
#include "launcher/command_line.h"

namespace tessera::train {
namespace {

struct DataKind {
  const char* name;  // of KIND:PATH
  models::Data data;
};
constexpr DataKind kKinds[] = {
    {"text", models::Data::kText},      {"tokens", models::Data::kText},
    {"mlm", models::Data::kMaskedText}, {"images", models::Data::kImages},
    {"cifar10", models::Data::kImages}, {"idx", models::Data::kImages}};

const char* data_for(const models::ModelSpec& spec) {
  switch (spec.data) {
    case models::Data::kText: return "text:PATH or tokens:PATH";
    case models::Data::kMaskedText: return "mlm:PATH";
    case models::Data::kImages: return "images:PATH, cifar10:DIR or idx:DIR";
    case models::Data::kValues: return "synthetic:";
  }
  throw BugError("there is no such kind of data");
}

void check_data(const Options& o) {
  if (o.data.empty() || o.data == "synthetic" || o.data == "synthetic:") return;
  const size_t colon = o.data.find(':');
  const std::string kind = o.data.substr(0, colon);
  const auto* at = std::ranges::find(kKinds, kind, &DataKind::name);
  TESSERA_CHECK(at != std::end(kKinds) && colon != std::string::npos,
                "train: --data \"{}\": expected text:PATH, tokens:PATH, mlm:PATH, images:PATH, "
                "cifar10:DIR, idx:DIR or synthetic:",
                o.data);
  const models::ModelSpec& spec = spec_of(o);
  TESSERA_CHECK(spec.data == at->data,
                "train: --model {} does not learn from --data {}:; give {} ({}: is for {})",
                o.model, kind, data_for(spec), kind, models::model_names(at->data));
}

// Checks the options that images need, and those that only images have.
void check_images(const Options& o) {
  auto one_of = [](const char* flag, const std::string& value,
                   std::initializer_list<const char*> known) {
    TESSERA_CHECK(std::ranges::find(known, value) != known.end(),
                  "train: {} \"{}\": expected one of {}", flag, value, fmt::join(known, ", "));
  };
  one_of("--augment", o.augment, {"auto", "none", "crop", "resized-crop"});
  one_of("--bad-images", o.bad_images, {"stop", "skip"});
  TESSERA_CHECK(o.image_size >= 0 && o.image_size <= 1 << 14,
                "train: --image-size {}: expected 1 to 16384", o.image_size);
  TESSERA_CHECK(o.workers >= 1 && o.workers <= 1024, "train: --workers {}: expected 1 to 1024",
                o.workers);
  TESSERA_CHECK(o.label_smoothing >= 0 && o.label_smoothing < 1,
                "train: --label-smoothing {}: it is in [0, 1)", o.label_smoothing);
  const bool images = spec_of(o).data == models::Data::kImages;
  TESSERA_CHECK(images || !o.sync_batch_norm,
                "train: --sync-batch-norm is for models of images, not for --model {}", o.model);
  TESSERA_CHECK(images || (o.image_size == 0 && o.augment == "auto" && o.label_smoothing == 0),
                "train: --image-size, --augment and --label-smoothing are for models of images");
  TESSERA_CHECK(!images || o.seq_len == 0, "train: --seq-len is for language models");
  TESSERA_CHECK(!o.sync_batch_norm || !o.deterministic,
                "train: --sync-batch-norm with --deterministic: statistics over several ranks are "
                "those of no micro-batch, so bits depend on the ranks. Leave one of them out");
}

void check_values(const Options& o) {
  // Numbers are bounded, so that products of two do not overflow.
  auto count = [](const char* flag, int64_t v) {
    constexpr int64_t kMost = 1 << 30;
    TESSERA_CHECK(v >= 1 && v <= kMost, "train: {} {}: expected 1 to {}", flag, v, kMost);
  };
  count("--batch-size", o.batch_size), count("--accumulate", o.accumulate),
      count("--logical-batches", o.logical_batches);
  TESSERA_CHECK(o.seq_len >= 0, "train: --seq-len {}: expected at least 1", o.seq_len);
  TESSERA_CHECK(o.steps >= -1 && o.epochs >= 0 && std::isfinite(o.epochs),
                "train: --steps {} --epochs {}: expected numbers from 0", o.steps, o.epochs);
  TESSERA_CHECK(o.steps < 0 || o.epochs == 0,
                "train: --steps {} and --epochs {} both say how long to train; give one of them",
                o.steps, o.epochs);
  TESSERA_CHECK(o.sample >= 0 && o.eval_every >= 0,
                "train: --sample {} --eval-every {}: expected at least 0", o.sample, o.eval_every);
  TESSERA_CHECK(o.clip_norm >= 0, "train: --clip-norm {}: expected 0 (no clipping) or more",
                o.clip_norm);
  TESSERA_CHECK(o.save_every >= 0 && o.keep >= 0,
                "train: --save-every {} --keep {}: expected at least 0", o.save_every, o.keep);
  TESSERA_CHECK(!o.checkpoint.empty() || !(o.resume || o.save_every || o.keep),
                "train: --resume, --save-every and --keep need --checkpoint FOLDER");
  TESSERA_CHECK(o.lr >= 0 && o.min_lr >= 0, "train: --lr {} --min-lr {}: rates are not negative",
                o.lr, o.min_lr);
  TESSERA_CHECK(o.schedule == "constant" || o.min_lr <= o.lr,
                "train: --min-lr {} is above --lr {}; schedules go down to it", o.min_lr, o.lr);
  TESSERA_CHECK(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1,
                "train: --betas {},{}: each is in [0, 1)", o.beta1, o.beta2);
  TESSERA_CHECK(
      !o.deterministic || o.accumulate == 1,
      "train: --deterministic counts micro-batches by --logical-batches; leave --accumulate out");
  spec_of(o);  // throws if there is no such model
  static const std::set<std::string> kStrategies = {"ddp",     "fsdp",    "hsdp", "tp",
                                                    "fsdp+tp", "hsdp+tp", "pp"};
  TESSERA_CHECK(
      kStrategies.contains(o.strategy),
      "train: unknown strategy \"{}\"; expected ddp, fsdp, hsdp, tp, fsdp+tp, hsdp+tp or pp",
      o.strategy);
  TESSERA_CHECK(
      !o.offload || shards_fully(o),
      "train: --offload with --strategy {}: it keeps the pieces of fully sharded models in "
      "memory of the host; give --strategy fsdp, hsdp, fsdp+tp or hsdp+tp",
      o.strategy);
  TESSERA_CHECK(o.recompute == "none" || o.recompute == "block" || o.recompute == "selective",
                "train: unknown --recompute {}; expected none, block or selective", o.recompute);
  TESSERA_CHECK(
      compiler::parse_compile_mode(o.compile_mode) == compiler::CompileMode::kDefault || o.compile,
      "train: --compile-mode {} is of --compile, which is not given; add it", o.compile_mode);
  TESSERA_CHECK(o.precision == "fp32" || o.precision == "tf32" || o.precision == "bf16" ||
                    o.precision == "fp16",
                "train: unknown precision \"{}\"; expected fp32, tf32, bf16 or fp16", o.precision);
  TESSERA_CHECK(
      !o.deterministic || o.precision != "fp16",
      "train: --deterministic with --precision fp16: each micro-batch is weighted by their "
      "number on a rank, and small fp16 numbers round differently under other weights. Use "
      "bf16 or fp32");
  TESSERA_CHECK(!o.exact_contraction || o.precision == "fp32",
                "train: --exact-contraction shares the sums of f32 products; --precision {} would "
                "round its terms. Leave one of them out",
                o.precision);
  TESSERA_CHECK(o.fp8 == "none" || o.fp8 == "current" || o.fp8 == "delayed",
                "train: unknown --fp8 {}; expected none, current or delayed", o.fp8);
  TESSERA_CHECK(o.fp8 != "none" || !o.fp8_powers_of_two,
                "train: --fp8-powers-of-two is of --fp8, which is not given; add it");
  TESSERA_CHECK(
      !o.fp8_gather || (o.fp8 != "none" && shards_fully(o) && !o.offload),
      "train: --fp8-gather with --fp8 {} and --strategy {}{}: it gathers the weights of "
      "--fp8 current or delayed where fsdp, hsdp, fsdp+tp or hsdp+tp shards them on their "
      "device; leave it out, or change these",
      o.fp8, o.strategy, o.offload ? " --offload" : "");
  TESSERA_CHECK(!o.exact_contraction || o.fp8 == "none",
                "train: --exact-contraction shares the sums of f32 products; --fp8 {} would round "
                "their factors. Leave one of them out",
                o.fp8);
  const auto known = {"sgd", "adamw", "rmsprop", "adagrad", "lion"};
  TESSERA_CHECK(std::ranges::count(known, o.optimizer) == 1,
                "train: unknown optimizer \"{}\"; expected one of {}", o.optimizer,
                fmt::join(known, ", "));
  TESSERA_CHECK(o.momentum >= 0 && o.momentum < 1, "train: --momentum {}: it is in [0, 1)",
                o.momentum);
  TESSERA_CHECK(!o.nesterov || (o.optimizer == "sgd" && o.momentum > 0),
                "train: --nesterov is for --optimizer sgd with --momentum");
  check_data(o);
  check_images(o);
}

// Refuses flags that the run would not use, whatever their values; `given`: whether a flag is on
// the command line.
void check_read(const Options& o, const std::function<bool(const std::string&)>& given) {
  const models::Data data = spec_of(o).data;
  const bool images = data == models::Data::kImages, values = data == models::Data::kValues,
             synthetic = is_synthetic(o);
  const std::string model = "for --model " + o.model;
  const struct {
    const char* flag;
    bool unread;
    std::string why;
  } all[] = {
      {"--bad-images", !images, "is for models of images, not " + model},
      {"--bad-images", !o.data.starts_with("images:"),
       "is for --data images:, whose files may fail"},
      {"--augment", synthetic, "is for images that are read, not for random values; give --data"},
      {"--seq-len", values, "is for language models, not " + model},
      {"--tokenizer", images || values, "is for language models, not " + model},
      {"--tokenizer", synthetic, "is for text that is read, not for random values; give --data"},
      {"--tokenizer", o.data.starts_with("tokens:"), "is for text; --data tokens: has its own"},
      {"--momentum", o.optimizer != "sgd", "is for --optimizer sgd, not " + o.optimizer},
      {"--betas", o.optimizer != "adamw" && o.optimizer != "lion",
       "is for --optimizer adamw and lion, not " + o.optimizer},
      {"--min-lr", o.schedule == "constant", "is where --schedule linear or cosine ends"},
      {"--logical-batches", !o.deterministic, "is for --deterministic"},
  };
  for (const auto& [flag, unread, why] : all)
    TESSERA_CHECK(!unread || !given(flag), "train: {} {}; leave it out", flag, why);
}

std::pair<double, double> parse_betas(const std::string& text) {
  double a = 0, b = 0;
  char rest = 0;
  TESSERA_CHECK(std::sscanf(text.c_str(), "%lf,%lf%c", &a, &b, &rest) == 2,
                "train: --betas \"{}\": expected two numbers as in 0.9,0.99", text);
  return {a, b};
}

// What --version prints: of devices too, since a program finds their libraries when it runs.
std::string version_and_libraries() {
  std::string text = version_text("train");
  for (DeviceKind kind : device_kinds())
    if (kind != DeviceKind::kCPU && kind != DeviceKind::kMeta)
      for (const Finding& f : runtime_of(kind).findings())
        text += "\n" + f.text + (f.advice.empty() ? "" : "; " + f.advice);
  return text;
}

// tlaunch --doctor passes this on, line by line.
void list_devices() {
  for (DeviceKind kind : device_kinds())
    if (kind != DeviceKind::kMeta)
      std::fputs(findings_text(runtime_of(kind).findings()).c_str(), stdout);
}

}  // namespace

const models::ModelSpec& spec_of(const Options& o) { return models::find_model("train", o.model); }

bool shards_fully(const Options& o) {
  return o.strategy.starts_with("fsdp") || o.strategy.starts_with("hsdp");
}

DType compute_dtype(const Options& o) {
  return o.precision == "bf16" ? kBF16 : o.precision == "fp16" ? kF16 : kF32;
}

Device device_of(const Options& o) {
  Device device = kCPU;
  if (o.device != "auto") {
    device = parse_device(o.device);
    TESSERA_CHECK(!device.is_meta(), "train: --device meta has no values; use cpu");
  } else {
    for (DeviceKind kind : device_kinds())
      if (!Device{kind}.is_meta() && runtime_of(kind).count() > 0) device = {kind};
  }
  check_device(device, "train");
  TESSERA_CHECK(
      !o.offload || !device.is_cpu(),
      "train: --offload on the CPU, whose memory is that of the host; leave it out, or give "
      "--device cuda");
  const bool numbered = o.device.find(':') != std::string::npos;
  if (!device.is_cpu() && !numbered)
    device.index = int8_t(job_environment().local_rank % runtime_of(device).count());
  return device;
}

Parsed parse_options(int argc, char** argv) {
  RawOptions o;
  CLI::App app{"Trains a model, on one rank or under tlaunch on many.", "train"};
  app.set_version_flag("--version", &version_and_libraries);
  app.get_formatter()->column_width(34);
  // If a flag is given twice, the last one counts, so that scripts can append overrides.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  for (const OptionRow& row : option_table()) row.declare(app, o);
  bool devices = false;
  app.add_flag("--devices", devices, "list the devices and libraries of this machine, and end");

  if (auto status = parse_command_line(app, argc, argv, 1)) return {o, *status};
  if (devices) return list_devices(), Parsed{o, 0};
  try {
    std::tie(o.beta1, o.beta2) = parse_betas(o.betas);
    for (const std::string& s : o.set_texts) {
      size_t eq = s.find('=');
      TESSERA_CHECK(eq != std::string::npos && eq > 0, "train: --set \"{}\": expected key=value",
                    s);
      o.set.emplace_back(s.substr(0, eq), s.substr(eq + 1));
    }
    auto given = [&](const std::string& flag) { return app.get_option(flag)->count() > 0; };
    // These optimizers add the decay to the gradient, which 0.1 would dominate.
    if (o.optimizer != "adamw" && o.optimizer != "lion" && !given("--weight-decay"))
      o.weight_decay = 0;
    check_values(o);
    check_read(o, given);
  } catch (const UserError& e) {
    print_usage_error(e.what());
    return {o, 1};
  }
  return {o, -1};
}

}  // namespace tessera::train
