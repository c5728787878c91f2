// What `train` and `bench` know of models: one row of a registry for each name of --model, in the
// model's own file. A program outside of this tree adds rows of its own (register_model) and calls
// train_main (examples/train/train_main.h). Invariant: no other code of `train` and `bench` names a
// model; asking for something that a row leaves out is an error that names it.
#pragma once
#include <any>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/io/safetensors.h"
#include "core/nn/module.h"
#include "examples/models/options.h"
#include "parallel/tensor_parallel.h"

namespace tessera::models {

/// The kind of data that a model learns from. It determines the model's arguments and result, and
/// which integer options it has whose values follow from the data.
enum class Data : uint8_t {
  kText,        // ids [B, T] -> logits [B, T, vocab] of the next ids; options: vocab, context
  kMaskedText,  // ids [B, T], some masked -> logits [B, T, vocab]; options: vocab, context
  kImages,      // [B, 3, H, W] -> logits [B, classes]; options: classes
  kValues,      // [B, in] -> logits [B, out]; random values only; options: in, out
};

/// The options of one model, of any copyable struct with `Fields fields_of(O&)` beside it. It is a
/// value: copies are independent.
class ModelOptions {
 public:
  template <class O>
  requires requires(O& o) { fields_of(o); }
  ModelOptions(O options)
      : value_(std::move(options)),
        fields_([](std::any& value) { return fields_of(std::any_cast<O&>(value)); }) {}

  /// Returns the struct itself. Throws std::bad_any_cast for another type.
  template <class O>
  O& as() {
    return std::any_cast<O&>(value_);
  }
  template <class O>
  const O& as() const {
    return std::any_cast<const O&>(value_);
  }
  /// Sets a field from text. Throws UserError as set_field does.
  void set(std::string_view key, std::string_view text) { set_field(fields_(value_), key, text); }
  void set(std::string_view key, int64_t value) { set(key, std::to_string(value)); }
  /// Returns the value of an integer field; nothing where there is none of that name.
  std::optional<int64_t> find_integer(std::string_view key) const;
  /// Returns the value of an integer field. Throws BugError where there is none.
  int64_t integer(std::string_view key) const;
  /// Returns names and values of all fields, in the order of fields_of, as set() takes them.
  std::vector<std::pair<std::string, std::string>> texts() const;

 private:
  std::any value_;
  Fields (*fields_)(std::any& value);
};

/// Adapts f(options, ...) of a struct of options to the functions below, which take a ModelOptions.
template <class O, class F>
auto on(F f) {
  return [f](const ModelOptions& options, auto&&... rest) {
    return f(options.as<O>(), std::forward<decltype(rest)>(rest)...);
  };
}

/// How a model is cut over a tensor-parallel axis.
struct TensorParallel {
  std::function<parallel::ParallelPlan(const ModelOptions&)> plan = {};  // null: it cannot be cut
  // The integer option that must be at least as large as the axis, and what it counts ("heads");
  // "": none.
  std::string field = {}, parts = {};
  // Why ranks could not compute results bit for bit (--exact-contraction); "": they can.
  std::string inexact = {};
};

/// How a model is cut into the stages of a pipeline.
struct PipelineCut {
  /// Makes stage `stage` of `stages`, which takes and returns activations where it is cut; its
  /// parameters have the names and initial values that they have in the whole model. Null: it
  /// cannot be cut.
  std::function<std::shared_ptr<nn::Module>(const ModelOptions&, int stage, int stages)> stage = {};
  /// The most stages there can be, what they are cut from ("layers"), and the option that gives
  /// more ("--set layers=4").
  std::function<int64_t(const ModelOptions&)> places = {};
  std::string parts = {};
  std::function<std::string(int stages)> remedy = {};
  /// The names of parameters of which two stages hold a copy (parallel::PipelineOptions::tied);
  /// null: none.
  std::function<std::vector<std::string>(const ModelOptions&)> tied = {};
};

/// How a model is read from and written to folders of Hugging Face.
struct FolderFormat {
  /// Reads options from the folder's config. Null: such folders are neither read nor written.
  std::function<void(ModelOptions&, const std::string& folder)> read = {};
  /// Throws UserError where these options cannot be written. Null: all can.
  std::function<void(const ModelOptions&, const std::string& folder)> check = {};
  std::function<void(const ModelOptions&, const std::string& folder, std::vector<NamedTensor> state,
                     const io::Metadata& metadata)>
      write = {};
};

/// Returns the loss of a model's result and its targets.
using Loss = std::function<Tensor(const Tensor& prediction, const Tensor& targets)>;

struct ModelSpec {
  std::string name;      // of --model
  ModelOptions options;  // before saved ones and --set
  Data data;
  /// Makes the model, with its initial values unless nn::SkipInit says otherwise.
  std::function<std::shared_ptr<nn::Module>(const ModelOptions&)> make;

  // ---- what may be left out
  Loss loss = {};  // null: the mean cross-entropy, with --label-smoothing
  std::vector<std::string> fsdp_groups = {};  // parallel::FsdpOptions::groups
  TensorParallel tensor_parallel = {};
  PipelineCut pipeline = {};
  FolderFormat folder = {};
  /// For kText: returns `tokens` ids that continue id 0, drawn by `key`.
  std::function<std::vector<int64_t>(nn::Module&, int64_t tokens, uint64_t key)> generate = {};
  /// For kImages: sets what suits images of this side, unless saved weights or --set do.
  std::function<void(ModelOptions&, int64_t side)> fit_images = {};
  int64_t length = 0;            // tokens of a sequence without --seq-len; 0: the context
  int64_t bench_batch_size = 8;  // of `bench` without --batch-size
};

/// Adds a row. Call it at the start of main: it is not thread-safe, and command lines are checked
/// against the rows that exist. Throws UserError for a name that is taken, and for a row without
/// `make` or without an option that its data need.
void register_model(ModelSpec spec);
/// The rows in the order of registration, those of this tree first. References stay valid.
const std::deque<ModelSpec>& registered_models();
/// Throws UserError that suggests a name and lists all of them; `program` begins its text.
const ModelSpec& find_model(std::string_view program, std::string_view name);
/// Returns the row's loss or, if it has none, the mean cross-entropy of logits [.., classes] and
/// targets i64 [..].
Loss loss_of(const ModelSpec& spec, double label_smoothing = 0);
/// The names, separated by commas; if `data` is given, of models that learn from it.
std::string model_names();
std::string model_names(Data data);

}  // namespace tessera::models
