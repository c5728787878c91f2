// The options of `train`, parsed and checked. A flag that is known but not available in this build
// is refused by name; nothing is silently ignored.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor/device.h"
#include "core/tensor/dtype.h"

namespace tessera::models {
struct ModelSpec;
}

namespace tessera::train {

struct Options {
  std::string model = "gpt-nano";
  std::string data;  // KIND:PATH; empty: synthetic
  std::string tokenizer = "char";
  int64_t batch_size = 12;  // global
  int64_t accumulate = 1;   // micro-batches of a rank in a step
  int64_t seq_len = 0;      // 0: the model's context
  int64_t image_size = 0;   // 0: that of the data, else 224
  std::string augment = "auto", bad_images = "stop";
  int workers = 1;     // threads of a rank that read
  int64_t steps = -1;  // -1: as many as --epochs implies, else 1000
  double epochs = 0;
  std::string optimizer = "adamw";
  double lr = 1e-3, min_lr = 0, weight_decay = 0.1, clip_norm = 1.0;
  double beta1 = 0.9, beta2 = 0.99, momentum = 0.9, label_smoothing = 0;
  bool nesterov = false;
  bool sync_batch_norm = false;  // statistics over the ranks that share a batch
  std::string schedule = "constant";
  int64_t warmup = 0;
  std::string strategy = "ddp", mesh;  // mesh: axes as dp=2,tp=2; empty: one axis of all ranks
  bool offload = false;                // what a rank holds is in memory of the host
  std::string backend;
  std::string device = "auto";           // text: device_of
  std::string compile_mode = "default";  // as compiler::parse_compile_mode
  std::string precision = "fp32";        // of products and attention: fp32, tf32, bf16 or fp16
  std::string fp8 = "none";  // scaling of linear layers in eight bits: none, current or delayed
  bool fp8_powers_of_two = false;  // its scales are powers of two
  bool fp8_gather = false;  // fully sharded weights of such layers are gathered in eight bits
  std::string recompute = "none";  // activations computed again in backward: none, block, selective
  uint64_t seed = 1337;
  bool deterministic = false, exact_contraction = false, compile = false;
  int64_t logical_batches = 4;
  std::string weights, save;
  int64_t sample = 0;
  int64_t eval_every = 0;                     // 0: at the end only
  std::string metrics, tensorboard, profile;  // files; tensorboard: a folder
  std::string checkpoint;                     // folder of saved steps; empty: none
  int64_t save_every = 0, keep = 0;           // steps; 0: at the end only, 0: all stay
  bool resume = false;
  std::vector<std::pair<std::string, std::string>> set;  // fields of the model's options
};

/// True for strategies that apply fully_shard.
bool shards_fully(const Options& options);
/// Returns the registry's row of --model. Throws UserError where there is none.
const models::ModelSpec& spec_of(const Options& options);
/// True if values are random: no --data, or synthetic:.
inline bool is_synthetic(const Options& o) {
  return o.data.empty() || o.data.starts_with("synthetic");
}
/// The dtype in which products and attention are computed.
DType compute_dtype(const Options& options);

/// The device of this rank: that of --device, or for a kind without an index, and for "auto", which
/// prefers any other kind to the CPU, the one with the rank's number on its host. Throws UserError
/// where it is not there.
Device device_of(const Options& options);

/// The result of parsing and checking.
struct Parsed {
  Options options;
  int exit_status = -1;  // >= 0: exit with this status; help or the error was printed
};
Parsed parse_options(int argc, char** argv);

}  // namespace tessera::train
