#include "examples/train/task.h"

#include <set>

#include "core/data/masked_dataset.h"
#include "core/data/token_dataset.h"
#include "core/data/tokens.h"
#include "core/data/utf8.h"
#include "core/data/wordpiece.h"
#include "core/ops/fused.h"
#include "examples/models/bert.h"
#include "examples/models/gpt.h"
#include "examples/models/hugging_face.h"
#include "examples/models/mlp.h"
#include "examples/train/fit.h"
#include "examples/train/image_task.h"
#include "examples/train/outputs.h"
#include "examples/train/synthetic.h"
#include "parallel/checkpoint/convert.h"

namespace tessera::train {
namespace {

Tensor mean_cross_entropy(const Tensor& logits, const Tensor& targets) {
  nn::Scope scope("loss");
  return cross_entropy(logits, targets);
}

// Fields of a folder's config are as fixed as its weights; what only training uses may differ.
template <class M>
void set_fields(const Options& o, M& m) {
  const bool fixed = models::is_hugging_face(o.weights);
  for (auto& [key, value] : o.set) {
    TESSERA_CHECK(!fixed || key.ends_with("dropout"),
                  "train: --set {}={}: config.json in --weights {} says what the model is; only "
                  "dropout may be set",
                  key, value, o.weights);
    models::set_option(m, key, value);
  }
}

// The vocabulary of the data is that of the model, unless its weights have one already.
void set_vocab(const Options& o, int64_t& vocab, int64_t of_data) {
  TESSERA_CHECK(!models::is_hugging_face(o.weights) || vocab == of_data,
                "train: the data has a vocabulary of {}, config.json in --weights {} says {}; give "
                "the --tokenizer that the model was trained with",
                of_data, o.weights, vocab);
  for (auto& [key, value] : o.set)
    TESSERA_CHECK(key != "vocab" || vocab == of_data,
                  "train: --set vocab={}, but the vocabulary of {} is {}; leave it out", value,
                  o.data, of_data);
  vocab = of_data;
}

void tell_tokens(const Options& o, const data::TokenSplit& split, Task& task) {
  task.data = {
      fmt::format("{} tokens train, {} validate", split.train.size(), split.validation.size()),
      io::to_string(split.hash)};
  task.data_story =
      fmt::format("{}: {}, a vocabulary of {}", o.data, task.data.size, split.vocab_size);
}

// What a file of these weights says of its ids.
void tell_vocabulary(Task& task, const std::string& spec) {
  task.metadata.emplace_back("tokenizer", data::escape_bytes(spec));  // it may be a path
  task.metadata.emplace_back("tokenizer.state", task.tokenizer->state());
  task.metadata.emplace_back("tokenizer.xxh128", vocabulary_hash(*task.tokenizer));
}

Task make_gpt_task(const Options& o) {
  Task task;
  models::GptOptions m = o.model == "gpt2" ? models::gpt2() : models::gpt_nano();
  // The options of a saved model, so that --weights needs no --set; given ones win.
  io::Metadata saved = saved_metadata(o.weights);
  for (auto& [key, value] : saved)
    if (key.starts_with("option.")) models::set_option(m, key.substr(7), value);
  if (models::is_hugging_face(o.weights)) m = models::gpt_from_hugging_face(o.weights);
  set_fields(o, m);
  int64_t length = o.seq_len ? o.seq_len : m.context;
  TESSERA_CHECK(length <= m.context,
                "train: --seq-len {} is longer than the model's context {}; give --set context={}",
                length, m.context, length);
  if (o.data.starts_with("text:") || o.data.starts_with("tokens:")) {
    data::TokenSplit split =
        data::load_tokens(o.data, o.data.starts_with("text:") ? o.tokenizer : "");
    set_vocab(o, m.vocab, split.vocab_size);
    task.tokenizer = split.tokenizer;
    tell_tokens(o, split, task);
    task.train =
        std::make_shared<data::RandomWindows>(split.train, length, o.seed, split.vocab_size);
    task.validation =
        std::make_shared<data::ConsecutiveWindows>(split.validation, length, split.vocab_size);
  } else {
    std::string spec = data::unescape_bytes(find(saved, "tokenizer"));
    if (!spec.empty()) task.tokenizer = data::make_tokenizer(spec, find(saved, "tokenizer.state"));
    task.train = std::make_shared<Synthetic>(Shape{length}, Shape{length}, m.vocab, true, o.seed);
  }
  TESSERA_CHECK(
      !saves_folder(o) || m.bias,
      "train: --save {}: Hugging Face's GPT-2 has biases, this model has none; give --set "
      "bias=true, or save a file that ends in .safetensors",
      o.save);
  nn::SkipInit later;
  models::GptPtr gpt = models::gpt(m);
  task.fill = [gpt, seed = o.seed] { gpt->init(seed); };
  task.model = gpt;
  task.save_folder = [m](const std::string& folder, std::vector<NamedTensor> state,
                         const io::Metadata& metadata) {
    models::save_hugging_face(folder, m, std::move(state), metadata);
  };
  task.tokens_per_sample = length;
  task.loss = mean_cross_entropy;
  auto tokenizer = task.tokenizer;
  uint64_t seed = o.seed;
  if (tokenizer)
    task.generate = [gpt, tokenizer, seed](int64_t tokens) {
      std::vector<int64_t> ids = models::generate(
          *gpt, {0}, {.tokens = tokens, .temperature = 0.8, .top_k = 0, .key = seed});
      std::vector<data::TokenId> text(ids.end() - tokens, ids.end());
      return tokenizer->decode(text);
    };
  auto field = [&](const char* name, auto value) {
    task.metadata.emplace_back(fmt::format("option.{}", name), fmt::format("{}", value));
  };
  field("vocab", m.vocab), field("context", m.context), field("layers", m.layers),
      field("heads", m.heads), field("dim", m.dim);
  field("dropout", m.dropout), field("bias", m.bias), field("tanh_gelu", m.tanh_gelu),
      field("tied", m.tied);
  if (tokenizer)
    tell_vocabulary(task,
                    o.data.empty() ? data::unescape_bytes(find(saved, "tokenizer")) : o.tokenizer);
  return task;
}

/// Masked language modelling; a row is [CLS], tokens of a window, [SEP].
Task make_bert_task(const Options& o) {
  Task task;
  models::BertOptions m = models::bert_options(o.model);
  for (auto& [key, value] : saved_metadata(o.weights))
    if (key.starts_with("option.")) models::set_option(m, key.substr(7), value);
  if (models::is_hugging_face(o.weights)) m = models::bert_from_hugging_face(o.weights);
  set_fields(o, m);
  int64_t length = o.seq_len ? o.seq_len : std::min<int64_t>(128, m.context);
  TESSERA_CHECK(length <= m.context,
                "train: --seq-len {} is longer than the model's context {}; give --set context={}",
                length, m.context, length);
  if (o.data.starts_with("mlm:")) {
    TESSERA_CHECK(o.tokenizer != "char" && o.tokenizer != "byte",
                  "train: --data mlm: needs a WordPiece vocabulary; give --tokenizer FILE");
    bool named = o.tokenizer.starts_with("wordpiece:");
    data::TokenSplit split =
        data::load_tokens("text:" + o.data.substr(4), (named ? "" : "wordpiece:") + o.tokenizer);
    auto tokenizer = std::static_pointer_cast<const data::WordPieceTokenizer>(split.tokenizer);
    task.tokenizer = tokenizer;
    tell_tokens(o, split, task);
    set_vocab(o, m.vocab, split.vocab_size);
    data::MaskingOptions masking{.length = length,
                                 .vocab_size = m.vocab,
                                 .cls = tokenizer->cls(),
                                 .sep = tokenizer->sep(),
                                 .mask = tokenizer->mask(),
                                 .seed = o.seed};
    task.train = std::make_shared<data::MaskedDataset>(split.train, masking, "training split");
    masking.random_windows = false;
    task.validation =
        std::make_shared<data::MaskedDataset>(split.validation, masking, "validation split");
  } else {
    task.train = std::make_shared<Synthetic>(Shape{length}, Shape{length}, m.vocab, true, o.seed);
  }
  nn::SkipInit later;
  auto bert = models::bert_for_masked_lm(m);
  task.fill = [bert, seed = o.seed] { bert->init(seed); };
  task.model = bert;
  task.save_folder = [m](const std::string& folder, std::vector<NamedTensor> state,
                         const io::Metadata& metadata) {
    models::save_hugging_face(folder, m, std::move(state), metadata);
  };
  task.tokens_per_sample = length;
  task.loss = mean_cross_entropy;
  auto field = [&](const char* name, auto value) {
    task.metadata.emplace_back(fmt::format("option.{}", name), fmt::format("{}", value));
  };
  field("vocab", m.vocab), field("context", m.context), field("segments", m.segments);
  field("layers", m.layers), field("heads", m.heads), field("dim", m.dim);
  field("hidden", m.hidden), field("dropout", m.dropout);
  field("attention_dropout", m.attention_dropout), field("eps", m.eps);
  if (task.tokenizer) tell_vocabulary(task, o.tokenizer);
  return task;
}

Task make_mlp_task(const Options& o) {
  TESSERA_CHECK(o.data.empty() || o.data.starts_with("synthetic"),
                "train: --model mlp learns from --data synthetic: only, got \"{}\"", o.data);
  Task task;
  models::MlpOptions m;
  for (auto& [key, value] : o.set) models::set_option(m, key, value);
  nn::SkipInit later;
  auto mlp = models::mlp(m);
  task.fill = [mlp, seed = o.seed] { mlp->init(seed); };
  task.model = mlp;
  task.samples = "samples";
  task.train = std::make_shared<Synthetic>(Shape{m.in}, Shape{}, m.out, false, o.seed);
  task.loss = mean_cross_entropy;
  return task;
}

}  // namespace

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
  std::vector<NamedTensor> state;
  if (!hugging_face)
    state = io::load_safetensors(o.weights);
  else if (part)
    state = models::load_hugging_face(o.weights);
  if (part) {
    std::set<std::string> own;
    for (const NamedTensor& t : model.state()) own.insert(t.name);
    std::erase_if(state, [&](const NamedTensor& t) { return !own.contains(t.name); });
  }
  try {
    if (hugging_face && !part)
      models::load_hugging_face(model, o.weights);
    else
      model.load_state(state);
  } catch (const UserError& e) {  // the lists may be long: what to do comes last
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

}  // namespace

Task make_task(const Options& o, Device device) {
  check_model(o);  // before the options of another one are set
  nn::OnDevice building(device);
  Task task = o.model == "mlp"                ? make_mlp_task(o)
              : o.model.starts_with("resnet") ? make_image_task(o)
              : o.model.starts_with("bert")   ? make_bert_task(o)
                                              : make_gpt_task(o);
  task.metadata.emplace_back("model", o.model);
  check_weights(o, task);
  task.weights_hash = hash_of_weights(o.weights);
  if (!o.weights.empty()) task.fill = [model = task.model, o] { load_weights(*model, o); };
  TESSERA_CHECK(
      !saves_folder(o) || task.save_folder,
      "train: --save {}: folders of Hugging Face are for gpt and bert models; give a file "
      "that ends in .safetensors",
      o.save);
  TESSERA_CHECK(o.sample == 0 || task.generate,
                "train: --sample needs a language model with text data, or weights that were saved "
                "with their tokenizer");
  return task;
}

}  // namespace tessera::train
