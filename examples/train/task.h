// A task is a model with the data it learns from. Invariant: sample number -> values depends on the
// seed alone, so every world size sees the same steps.
#pragma once
#include <functional>
#include <memory>

#include "core/data/dataset.h"
#include "core/data/tokenizer.h"
#include "core/io/safetensors.h"
#include "core/nn/module.h"
#include "examples/models/registry.h"
#include "examples/train/options.h"

namespace tessera::train {

/// What was read, so that ranks and resumed runs know whether they read the same. Empty for random
/// values.
struct DataFacts {
  std::string size;  // "900 tokens train, 100 validate"
  std::string hash;  // TokenSplit::hash, ImageSplit::hash
};
inline std::string to_string(const DataFacts& d) { return d.size + ", xxh128 " + d.hash; }

struct Task {
  const models::ModelSpec* spec;
  models::ModelOptions options;  // of the model
  std::shared_ptr<nn::Module> model = nullptr;
  std::function<void()> fill = {};    // draws the parameters from the seed, or loads --weights
  models::Loss loss = {};             // the mean over the batch
  models::Loss validation_loss = {};  // what validation reports; null: loss
  bool classifies = false;  // predictions are logits [B, classes]: validation reports accuracy too
  std::shared_ptr<const data::Dataset> train = nullptr,
                                       validation = nullptr;   // the latter may be null
  std::shared_ptr<const data::Tokenizer> tokenizer = nullptr;  // null without text
  // Samples so far that could not be read; null where all must be.
  std::function<int64_t()> skipped = {};
  const char* samples = "sequences";  // what to call them
  DataFacts data = {};
  std::string weights_hash = {};  // of the files of --weights
  std::string data_story = {};    // what was read, a line; empty for random values
  int64_t tokens_per_sample = 0;  // 0: not a language model
  int64_t validation_batch = 64;  // fixed, so that validation sums in one order
  std::function<std::string(int64_t tokens)> generate = {};  // null where nothing can be generated
  std::vector<std::pair<std::string, std::string>> metadata = {};  // of a saved file
};

/// Loads the weights in --weights, a file, a folder of shards or a folder of Hugging Face, into
/// `model`, which may be a part of the one that was saved where `part`. Throws UserError for a file
/// that says itself that it is damaged, and for what does not fit.
void load_weights(nn::Module& model, const Options& o, bool part = false);

/// Builds the task that the options describe: model (without values until fill), data, loss.
/// `device`: of the parameters; kMeta for a model that is to be cut before it has values.
Task make_task(const Options& options, Device device = {});

/// What each kind of data brings to a task: its data sets, the options that follow from them, and
/// what is saved beside weights (`saved`: what was saved beside --weights).
void add_text(const Options& o, const io::Metadata& saved, Task& task);    // kText, kMaskedText
void add_images(const Options& o, const io::Metadata& saved, Task& task);  // kImages
/// Fields of --set. Those of a folder of Hugging Face are as fixed as its weights; what only
/// training uses may differ.
void set_fields(const Options& o, models::ModelOptions& options);
/// The model's options become metadata; they are final then.
void tell_options(Task& task);

/// Metadata of a file of weights (the first, where they are in several); empty for an empty path.
io::Metadata saved_metadata(const std::string& path);
/// The value of `key`; empty where it is missing.
std::string find(const io::Metadata& metadata, const std::string& key);

}  // namespace tessera::train
