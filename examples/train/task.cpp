#include "examples/train/task.h"

#include <set>

#include "core/nn/fp8.h"
#include "core/ops/create.h"
#include "examples/models/hugging_face.h"
#include "examples/train/fit.h"
#include "examples/train/outputs.h"
#include "examples/train/synthetic.h"
#include "parallel/checkpoint/convert.h"

namespace tessera::train {

void set_fields(const Options& o, models::ModelOptions& options) {
  const bool fixed = models::is_hugging_face(o.weights);
  for (auto& [key, value] : o.set) {
    TESSERA_CHECK(!fixed || key.ends_with("dropout"),
                  "train: --set {}={}: config.json in --weights {} says what the model is; only "
                  "dropout may be set",
                  key, value, o.weights);
    options.set(key, value);
  }
}

void tell_options(Task& task) {
  for (auto& [name, value] : task.options.texts())
    task.metadata.emplace_back("option." + name, value);
}

std::string find(const io::Metadata& m, const std::string& key) {
  auto it = m.find(key);
  return it == m.end() ? "" : it->second;
}

io::Metadata saved_metadata(const std::string& path) {
  TESSERA_CHECK(
      path.empty() || !checkpoint::is_checkpoint(path),
      "train: --weights {} is a checkpoint; go on from it with --checkpoint and --resume, "
      "or make weights of it with tckpt consolidate {} --to FILE.safetensors",
      path, path);
  return path.empty() ? io::Metadata{} : io::SafetensorsSet::open(path).files()[0].metadata();
}

void load_weights(nn::Module& model, const Options& o, bool part) {
  check_intact(o.weights);
  const bool hugging_face = models::is_hugging_face(o.weights);
  nn::reset_fp8_scales(model);
  std::vector<NamedTensor> state, histories;
  for (const NamedTensor& t : model.state())
    if (nn::is_fp8_history(t.name))
      histories.push_back({t.name, zeros(t.tensor.shape(), {.dtype = kF32})});
  if (!hugging_face)
    state = io::load_safetensors(o.weights);
  else if (part || !histories.empty())
    state = models::load_hugging_face(o.weights);
  // Weights have no history of scales; those of a checkpoint are of another run.
  std::erase_if(state, [](const NamedTensor& t) { return nn::is_fp8_history(t.name); });
  state.insert(state.end(), histories.begin(), histories.end());
  if (part) {
    std::set<std::string> own;
    for (const NamedTensor& t : model.state()) own.insert(t.name);
    std::erase_if(state, [&](const NamedTensor& t) { return !own.contains(t.name); });
  }
  try {
    if (hugging_face && !part && histories.empty())
      models::load_hugging_face(model, o.weights);
    else
      model.load_state(state);
  } catch (const UserError& e) {  // what to do comes last, since the lists may be long
    throw UserError(
        fmt::format("{}\ntrain: the weights in {} are not those of --model {} with the options "
                    "given; give their "
                    "--model, and its options with --set",
                    e.what(), o.weights, o.model));
  }
}

namespace {

void check_model(const Options& o) {
  const std::string saved = find(saved_metadata(o.weights), "model");
  TESSERA_CHECK(saved.empty() || saved == o.model,
                "train: --weights {} were saved by --model {}, not {}; give that model", o.weights,
                saved, o.model);
}

std::string hash_of_weights(const std::string& path) {
  if (path.empty()) return {};
  io::Xxh128 hash;
  const io::SafetensorsSet set = io::SafetensorsSet::open(path);
  for (const io::SafetensorsFile& file : set.files()) {
    const io::Digest of_file = io::sampled_xxh128(file.path(), "train");
    hash.update(&of_file, sizeof of_file);
  }
  return "xxh128 " + io::to_string(hash.digest());
}

void add_values(const Options& o, Task& task) {
  set_fields(o, task.options);
  task.samples = "samples";
  task.train = std::make_shared<Synthetic>(Shape{task.options.integer("in")}, Shape{},
                                           task.options.integer("out"), false, o.seed);
  tell_options(task);
}

void add_data(const Options& o, const io::Metadata& saved, Task& task) {
  switch (task.spec->data) {
    case models::Data::kText:
    case models::Data::kMaskedText: return add_text(o, saved, task);
    case models::Data::kImages: return add_images(o, saved, task);
    case models::Data::kValues: return add_values(o, task);
  }
}

void add_losses(const Options& o, Task& task) {
  TESSERA_CHECK(!task.spec->loss || o.label_smoothing == 0,
                "train: --label-smoothing {}: --model {} has a loss of its own; leave it out",
                o.label_smoothing, o.model);
  task.loss = models::loss_of(*task.spec, o.label_smoothing);
  task.classifies = task.spec->data == models::Data::kImages;
  if (task.classifies) task.validation_loss = models::loss_of(*task.spec);
}

void check_save_folder(const Options& o, const Task& task) {
  if (!saves_folder(o)) return;
  const models::FolderFormat& folder = task.spec->folder;
  if (!folder.write) {
    std::string others;
    for (const models::ModelSpec& spec : models::registered_models())
      if (spec.folder.write) others += (others.empty() ? "" : ", ") + spec.name;
    throw UserError(
        fmt::format("train: --save {}: folders of Hugging Face are for {}; give a file "
                    "that ends in .safetensors",
                    o.save, others));
  }
  if (folder.check) folder.check(task.options, o.save);
}

}  // namespace

std::string use_fp8(nn::Module& model, const Options& o) {
  if (o.fp8 == "none") return {};
  const nn::Fp8Layers done = nn::convert_to_fp8(
      model, {.recipe = o.fp8 == "delayed" ? nn::Fp8Recipe::kDelayed : nn::Fp8Recipe::kCurrent,
              .skip_unfit = true,
              .power_of_two_scales = o.fp8_powers_of_two,
              .gather_in_eight_bits = o.fp8_gather});
  std::string left;
  for (const std::string& path : done.left) left += (left.empty() ? "" : ", ") + path;
  return fmt::format("fp8: {} of {} linear layers multiply in eight bits, {} scaling{}",
                     done.converted.size(), done.converted.size() + done.left.size(), o.fp8,
                     left.empty() ? "" : "; widths that are no multiples of 16: " + left);
}

Task make_task(const Options& o, Device device) {
  check_model(o);  // before options of another model are set
  nn::OnDevice building(device);
  const models::ModelSpec& spec = spec_of(o);
  Task task{.spec = &spec, .options = spec.options};
  // The options of a saved model are used, so that --weights needs no --set; options that are given
  // take precedence.
  const io::Metadata saved = saved_metadata(o.weights);
  for (auto& [key, value] : saved)
    if (key.starts_with("option.")) task.options.set(key.substr(7), value);
  if (spec.folder.read && models::is_hugging_face(o.weights))
    spec.folder.read(task.options, o.weights);
  add_data(o, saved, task);
  add_losses(o, task);
  check_save_folder(o, task);
  task.metadata.emplace_back("model", o.model);
  check_weights(o, task);
  {
    nn::SkipInit later;
    task.model = spec.make(task.options);
  }
  task.fp8_story = use_fp8(*task.model, o);
  TESSERA_CHECK(o.fp8 == "none" || !task.fp8_story.starts_with("fp8: 0 of"),
                "train: --fp8 {}: --model {} has no linear layer whose widths are multiples of 16, "
                "which cards multiply in eight bits; choose such widths with --set, or leave --fp8 "
                "out",
                o.fp8, o.model);
  task.weights_hash = hash_of_weights(o.weights);
  task.fill = [model = task.model, o] {
    if (o.weights.empty())
      model->init(o.seed);
    else
      load_weights(*model, o);
  };
  if (spec.generate && task.tokenizer)
    task.generate = [model = task.model, &spec, tokenizer = task.tokenizer,
                     seed = o.seed](int64_t tokens) {
      const std::vector<int64_t> ids = spec.generate(*model, tokens, seed);
      return tokenizer->decode(std::vector<data::TokenId>(ids.begin(), ids.end()));
    };
  TESSERA_CHECK(o.sample == 0 || task.generate,
                "train: --sample needs a language model with text data, or weights that were saved "
                "with their tokenizer");
  return task;
}

}  // namespace tessera::train
