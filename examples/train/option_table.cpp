#include "examples/train/option_table.h"

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>

#include "examples/models/registry.h"

namespace tessera::train {
namespace {

template <class T>
OptionRow row(const char* flag, T Options::*field, Role role, const std::string& help) {
  auto declare = [=](CLI::App& app, RawOptions& o) {
    const std::string name = std::string("--") + flag;
    if constexpr (std::is_same_v<T, bool>)
      app.add_flag(name, o.*field, help);
    else
      app.add_option(name, o.*field, help)->capture_default_str();
  };
  return {flag, role, declare, [=](const Options& o) { return fmt::format("{}", o.*field); }};
}

OptionRow betas_row() {
  return {"betas", Role::kNumbers,
          [](CLI::App& app, RawOptions& o) {
            app.add_option("--betas", o.betas, "decay rates of the moments of adamw and lion")
                ->capture_default_str();
          },
          [](const Options& o) { return fmt::format("{},{}", o.beta1, o.beta2); }};
}

// Checkpoints store the resulting fields of the model instead.
OptionRow set_row() {
  return {"set", Role::kTogether,
          [](CLI::App& app, RawOptions& o) {
            app.add_option(
                   "--set", o.set_texts,
                   "key=value: a field of the model's options (layers, heads, dim, dropout, ...)")
                ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
          },
          [](const Options& o) {
            std::string text;
            for (const auto& [key, value] : o.set)
              text += fmt::format("{}{}={}", text.empty() ? "" : " ", key, value);
            return text;
          }};
}

}  // namespace

std::span<const OptionRow> option_table() {
  using enum Role;
  static const std::vector<OptionRow> table = {
      row("model", &Options::model, kNumbers, models::model_names()),
      row("data", &Options::data, kData,
          "text:PATH or mlm:PATH (file or folder), tokens:PATH, images:PATH (folder or tar of "
          "class "
          "folders, or of train and val with class folders), cifar10:DIR, idx:DIR or synthetic: "
          "(random values, also where nothing is given)"),
      row("tokenizer", &Options::tokenizer, kData,
          "byte, char or a GPT-2 ranks file (for weights of gpt2); mlm: a WordPiece vocabulary"),
      row("batch-size", &Options::batch_size, kNumbers,
          "sequences or images in a step, over all ranks"),
      row("accumulate", &Options::accumulate, kNumbers,
          "micro-batches a rank runs before gradients are reduced; under pp they follow each other "
          "through the stages"),
      row("seq-len", &Options::seq_len, kNumbers, "tokens of a sequence; 0: the model's context"),
      row("image-size", &Options::image_size, kNumbers,
          "side of images; 0: that of cifar10: and idx:, else 224"),
      row("augment", &Options::augment, kNumbers,
          "none, crop (shifts and mirrors), resized-crop (random areas, and mirrors) or auto: crop "
          "up "
          "to 64 pixels, none for idx:"),
      row("bad-images", &Options::bad_images, kNumbers,
          "images that cannot be read stop the run, or skip: the next one trains, and validation "
          "goes "
          "without; they are counted"),
      row("workers", &Options::workers, kOwn, "threads of a rank that read data"),
      row("steps", &Options::steps, kNumbers, "optimizer steps; -1: those of --epochs, else 1000"),
      row("epochs", &Options::epochs, kNumbers,
          "passes over the training split, instead of --steps"),
      row("optimizer", &Options::optimizer, kNumbers, "adamw, sgd, rmsprop, adagrad or lion"),
      row("lr", &Options::lr, kNumbers, "highest learning rate"),
      row("min-lr", &Options::min_lr, kNumbers, "learning rate at the end of a schedule"),
      betas_row(),
      row("momentum", &Options::momentum, kNumbers, "momentum of sgd"),
      row("nesterov", &Options::nesterov, kNumbers, "sgd with Nesterov's momentum"),
      row("sync-batch-norm", &Options::sync_batch_norm, kNumbers,
          "batch-norm takes its statistics over the ranks that share a batch, as one rank "
          "with the whole of it would"),
      row("label-smoothing", &Options::label_smoothing, kNumbers,
          "share of the target that is spread evenly over all classes"),
      row("schedule", &Options::schedule, kNumbers, "constant, linear or cosine"),
      row("warmup", &Options::warmup, kNumbers, "steps over which the rate rises"),
      row("weight-decay", &Options::weight_decay, kNumbers,
          "decay of matrices; norms and biases do not decay; sgd, rmsprop and adagrad: 0 unless "
          "given"),
      row("clip-norm", &Options::clip_norm, kNumbers,
          "largest norm of all gradients together; 0: no clipping"),
      row("backend", &Options::backend, kTogether,
          "collectives between CPU ranks: shm or gloo; default by host"),
      row("device", &Options::device, kTogether,
          "auto (a card where there is one), cpu, or another kind of device, as in cuda or cuda:1"),
      row("seed", &Options::seed, kNumbers, "seed of weights, data order and dropout"),
      row("deterministic", &Options::deterministic, kNumbers,
          "the same bits on any power-of-two number of ranks, with any number of threads"),
      row("logical-batches", &Options::logical_batches, kNumbers,
          "micro-batches of a step under --deterministic"),
      row("compile", &Options::compile, kTogether,
          "run steps as one compiled graph each, where the strategy lets them be one; sums may "
          "differ from eager ones in their last digits"),
      row("compile-mode", &Options::compile_mode, kTogether,
          "of --compile: default, reduce-overhead (no generated kernels), or max-autotune (cards: "
          "the first steps also measure several streams)"),
      row("exact-contraction", &Options::exact_contraction, kNumbers,
          "products that ranks can share to the bit: with --deterministic, tp and fsdp+tp too "
          "give the bits of one rank; not of models with convolutions"),
      row("weights", &Options::weights, kStart,
          "safetensors file, or folder of Hugging Face, to start from"),
      row("save", &Options::save, kGiven,
          "safetensors file to write at the end; FOLDER/ as Hugging Face's transformers reads it"),
      row("sample", &Options::sample, kTogether, "tokens to generate at the end"),
      row("eval-every", &Options::eval_every, kTogether,
          "steps between validations; 0: at the end only"),
      row("metrics", &Options::metrics, kOwn, "JSON lines file, one line a step"),
      row("tensorboard", &Options::tensorboard, kOwn,
          "folder for TensorBoard's event files: numbers of every step"),
      row("profile", &Options::profile, kGiven,
          "Chrome trace file of all ranks; records the ten steps after the third"),
      row("checkpoint", &Options::checkpoint, kTogether,
          "folder for saved steps: weights, optimizer, data position"),
      row("save-every", &Options::save_every, kTogether,
          "steps between saves; 0: at the end, and where SIGINT or SIGTERM stops the run"),
      row("keep", &Options::keep, kTogether, "newest saves that stay; 0: all"),
      row("resume", &Options::resume, kTogether,
          "go on from the newest save in --checkpoint, if there is one"),
      set_row(),
      row("strategy", &Options::strategy, kTogether, "ddp, fsdp, hsdp, tp, fsdp+tp, hsdp+tp or pp"),
      row("mesh", &Options::mesh, kTogether,
          "ranks along each axis: dp=N (ddp, fsdp), replicate=N,shard=N (hsdp), tp=N, pp=N, "
          "dp=N,tp=N, dp=N,pp=N ..."),
      row("offload", &Options::offload, kTogether,
          "keep a rank's parameters, gradients and optimizer state in memory of the host, where "
          "the "
          "update runs: for fsdp, hsdp, fsdp+tp and hsdp+tp on a device"),
      row("precision", &Options::precision, kNumbers,
          "type of products and attention: fp32, tf32 (fp32, in which cards round operands of "
          "products to 11 bits and CPUs do not), bf16 or fp16 (dynamic loss scaling); weights, "
          "gradients, norms and the loss stay fp32"),
      row("fp8", &Options::fp8, kNumbers,
          "linear layers multiply in eight bits, scaled by the largest value of each tensor "
          "(current) or of the last 16 steps (delayed); faster on cards from capability 8.9 on"),
      row("fp8-powers-of-two", &Options::fp8_powers_of_two, kNumbers,
          "with --fp8: scales are powers of two, which round nothing themselves"),
      row("fp8-gather", &Options::fp8_gather, kTogether,
          "with --fp8 and fsdp, hsdp, fsdp+tp or hsdp+tp: weights of such layers are gathered in "
          "eight bits; the numbers stay the same"),
      row("recompute", &Options::recompute, kTogether,
          "activations of blocks that backward computes again instead of keeping them: none, block "
          "(all) or selective (all but results of products and attention)"),
  };
  return table;
}

}  // namespace tessera::train
