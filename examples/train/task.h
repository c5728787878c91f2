// A task: a model with the data that it learns from. Invariant: the values of a sample depend only
// on its number and the seed, so every number of ranks sees the same steps.
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

/// Facts about what was read, by which ranks and resumed runs find out whether they read the same.
/// They are empty for random values.
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
  models::Loss validation_loss = {};  // reported by validation; null: loss
  bool classifies = false;  // predictions are logits [B, classes]; validation reports accuracy too
  std::shared_ptr<const data::Dataset> train = nullptr,
                                       validation = nullptr;   // the latter may be null
  std::shared_ptr<const data::Tokenizer> tokenizer = nullptr;  // null without text
  // Returns the number of samples so far that could not be read; null where that is an error.
  std::function<int64_t()> skipped = {};
  const char* samples = "sequences";  // what to call them
  DataFacts data = {};
  std::string weights_hash = {};  // of the files of --weights
  std::string data_story = {};    // a line that says what was read; empty for random values
  std::string fp8_story = {};     // one about layers in eight bits; empty without --fp8
  int64_t tokens_per_sample = 0;  // 0: not a language model
  int64_t validation_batch = 64;  // fixed, so that validation sums in one order
  std::function<std::string(int64_t tokens)> generate = {};  // null if the model cannot generate
  std::vector<std::pair<std::string, std::string>> metadata = {};  // saved with weights
};

/// Loads the weights in --weights (a file, a folder of shards or a Hugging Face folder) into
/// `model`. If `part`, the model may be a part of the one that was saved. Throws UserError for a
/// file whose hash shows that it is damaged, and for weights that do not fit.
void load_weights(nn::Module& model, const Options& o, bool part = false);

/// Lets linear layers of `model`, which is new, multiply in eight bits, as --fp8 says; layers with
/// a width that is no multiple of 16 stay as they are. Returns a line that says so.
std::string use_fp8(nn::Module& model, const Options& o);

/// Builds the task that the options describe: model (without values until fill), data, loss.
/// `device` is that of the parameters; kMeta for a model that is cut before it gets values.
Task make_task(const Options& options, Device device = {});

/// These add what a kind of data brings to a task: its data sets, the options that follow from
/// them, and what is saved beside weights (`saved`: what was saved beside --weights).
void add_text(const Options& o, const io::Metadata& saved, Task& task);    // kText, kMaskedText
void add_images(const Options& o, const io::Metadata& saved, Task& task);  // kImages
/// Sets the fields in --set. The fields of a Hugging Face folder are as fixed as its weights; those
/// that only training uses may differ.
void set_fields(const Options& o, models::ModelOptions& options);
/// Adds the model's options to the metadata; they must not change after that.
void tell_options(Task& task);

/// Returns the metadata of a file of weights (the first one of several); empty for an empty path.
io::Metadata saved_metadata(const std::string& path);
/// Returns the value of `key`; empty where it is missing.
std::string find(const io::Metadata& metadata, const std::string& key);

}  // namespace tessera::train
