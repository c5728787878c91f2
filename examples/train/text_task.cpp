// Data of language models: texts and files of tokens, and texts with masked tokens.
#include "core/data/masked_dataset.h"
#include "core/data/token_dataset.h"
#include "core/data/tokens.h"
#include "core/data/utf8.h"
#include "core/data/wordpiece.h"
#include "examples/models/hugging_face.h"
#include "examples/train/fit.h"
#include "examples/train/synthetic.h"
#include "examples/train/task.h"

namespace tessera::train {
namespace {

// Sets the model's vocabulary to that of the data, unless its weights have one already.
void set_vocab(const Options& o, models::ModelOptions& options, int64_t of_data) {
  const int64_t vocab = options.integer("vocab");
  TESSERA_CHECK(!models::is_hugging_face(o.weights) || vocab == of_data,
                "train: the data has a vocabulary of {}, config.json in --weights {} says {}; give "
                "the --tokenizer that the model was trained with",
                of_data, o.weights, vocab);
  for (auto& [key, value] : o.set)
    TESSERA_CHECK(key != "vocab" || vocab == of_data,
                  "train: --set vocab={}, but the vocabulary of {} is {}; leave it out", value,
                  o.data, of_data);
  options.set("vocab", of_data);
}

void tell_tokens(const Options& o, const data::TokenSplit& split, Task& task) {
  task.data = {
      fmt::format("{} tokens train, {} validate", split.train.size(), split.validation.size()),
      io::to_string(split.hash)};
  task.data_story =
      fmt::format("{}: {}, a vocabulary of {}", o.data, task.data.size, split.vocab_size);
}

// Adds what the metadata of saved weights say about ids.
void tell_vocabulary(Task& task, const std::string& spec) {
  task.metadata.emplace_back("tokenizer", data::escape_bytes(spec));  // it may be a path
  task.metadata.emplace_back("tokenizer.state", task.tokenizer->state());
  task.metadata.emplace_back("tokenizer.xxh128", vocabulary_hash(*task.tokenizer));
}

int64_t length_of(const Options& o, const Task& task) {
  const int64_t context = task.options.integer("context"), usual = task.spec->length;
  const int64_t length = o.seq_len ? o.seq_len : usual ? std::min(usual, context) : context;
  TESSERA_CHECK(length <= context,
                "train: --seq-len {} is longer than the model's context {}; give --set context={}",
                length, context, length);
  return length;
}

// Adds windows of a text or of a file of tokens, each with the ids that follow.
void add_windows(const Options& o, int64_t length, Task& task) {
  data::TokenSplit split =
      data::load_tokens(o.data, o.data.starts_with("text:") ? o.tokenizer : "");
  set_vocab(o, task.options, split.vocab_size);
  task.tokenizer = split.tokenizer;
  tell_tokens(o, split, task);
  task.train = std::make_shared<data::RandomWindows>(split.train, length, o.seed, split.vocab_size);
  task.validation =
      std::make_shared<data::ConsecutiveWindows>(split.validation, length, split.vocab_size);
}

// Adds rows that consist of [CLS], tokens of a window, some of them masked, and [SEP].
void add_masked_windows(const Options& o, int64_t length, Task& task) {
  TESSERA_CHECK(o.tokenizer != "char" && o.tokenizer != "byte",
                "train: --data mlm: needs a WordPiece vocabulary; give --tokenizer FILE");
  bool named = o.tokenizer.starts_with("wordpiece:");
  data::TokenSplit split =
      data::load_tokens("text:" + o.data.substr(4), (named ? "" : "wordpiece:") + o.tokenizer);
  auto tokenizer = std::static_pointer_cast<const data::WordPieceTokenizer>(split.tokenizer);
  task.tokenizer = tokenizer;
  tell_tokens(o, split, task);
  set_vocab(o, task.options, split.vocab_size);
  data::MaskingOptions masking{.length = length,
                               .vocab_size = task.options.integer("vocab"),
                               .cls = tokenizer->cls(),
                               .sep = tokenizer->sep(),
                               .mask = tokenizer->mask(),
                               .seed = o.seed};
  task.train = std::make_shared<data::MaskedDataset>(split.train, masking, "training split");
  masking.random_windows = false;
  task.validation =
      std::make_shared<data::MaskedDataset>(split.validation, masking, "validation split");
}

}  // namespace

void add_text(const Options& o, const io::Metadata& saved, Task& task) {
  set_fields(o, task.options);
  const int64_t length = length_of(o, task);
  const bool masked = task.spec->data == models::Data::kMaskedText;
  const std::string saved_tokenizer = masked ? "" : data::unescape_bytes(find(saved, "tokenizer"));
  if (is_synthetic(o)) {
    if (!saved_tokenizer.empty())
      task.tokenizer = data::make_tokenizer(saved_tokenizer, find(saved, "tokenizer.state"));
    task.train = std::make_shared<Synthetic>(Shape{length}, Shape{length},
                                             task.options.integer("vocab"), true, o.seed);
  } else if (masked) {
    add_masked_windows(o, length, task);
  } else {
    add_windows(o, length, task);
  }
  task.tokens_per_sample = length;
  tell_options(task);
  if (task.tokenizer) tell_vocabulary(task, o.data.empty() ? saved_tokenizer : o.tokenizer);
}

}  // namespace tessera::train
