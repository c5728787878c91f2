#include "examples/train/fit.h"

#include <fmt/ranges.h>

#include <sstream>

namespace tessera::train {
namespace {

using io::quote;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

std::vector<std::string> characters_of(const std::string& utf8) {
  std::vector<std::string> out;
  for (char c : utf8) {
    const bool continues = (static_cast<unsigned char>(c) & 0xc0) == 0x80;
    if (!continues || out.empty()) out.emplace_back();
    out.back() += c;
  }
  return out;
}

// Throws at the first index where the lists differ.
void check_list(const Options& o, const char* what, const std::string& where,
                const std::vector<std::string>& saved, const std::vector<std::string>& mine,
                const char* remedy) {
  if (saved == mine) return;
  size_t i = 0;
  while (i < saved.size() && i < mine.size() && saved[i] == mine[i]) ++i;
  auto at = [&](const std::vector<std::string>& list) {
    return i < list.size() ? quote(list[i]) : "none";
  };
  throw UserError(fmt::format("train: {} {} of {} is {}, of --data {} it is {}; {}", what, i + 1,
                              where, at(saved), o.data, at(mine), remedy));
}

void check_vocabulary(const Options& o, const io::Metadata& saved, const io::Metadata& mine,
                      const std::string& where) {
  constexpr const char* kRemedy = "give the text and --tokenizer that the model was trained with";
  const std::string state = find(saved, "tokenizer.state"),
                    my_state = find(mine, "tokenizer.state");
  if (!state.empty() && !my_state.empty())
    check_list(o, "character", where, characters_of(state), characters_of(my_state), kRemedy);
  const std::string hash = find(saved, "tokenizer.xxh128"),
                    my_hash = find(mine, "tokenizer.xxh128");
  TESSERA_CHECK(hash.empty() || my_hash.empty() || hash == my_hash,
                "train: the vocabulary of {} is that of --tokenizer {} (xxh128 {}), this run's is "
                "that of --tokenizer {} (xxh128 {}); {}",
                where, find(saved, "tokenizer"), hash, find(mine, "tokenizer"), my_hash, kRemedy);
}

io::Metadata metadata_of(const Task& task) { return {task.metadata.begin(), task.metadata.end()}; }

// True for options that change what the model computes. Dropout only changes how training goes on.
bool is_option(const std::string& key) {
  return key.starts_with("option.") && !key.ends_with("dropout");
}

void check_options(const io::Metadata& saved, const io::Metadata& mine, const std::string& folder) {
  std::vector<std::string> was, is;
  for (const auto& [key, value] : saved) {
    auto at = mine.find(key);
    if (!is_option(key) || at == mine.end() || at->second == value) continue;
    was.push_back(fmt::format("--set {}={}", key.substr(7), value));
    is.push_back(fmt::format("{}={}", at->first.substr(7), at->second));
  }
  TESSERA_CHECK(was.empty(),
                "train: --resume: {} was saved with {}, this run has {}; give what it was saved "
                "with, or another --checkpoint folder",
                folder, fmt::join(was, " "), fmt::join(is, ", "));
}

}  // namespace

std::string vocabulary_hash(const data::Tokenizer& tokenizer) {
  io::Xxh128 hash;
  for (data::TokenId id = 0; id < tokenizer.vocab_size(); ++id) {
    // The id is decoded after another one: alone, a piece that continues a word would look like one
    // that begins it.
    const data::TokenId pair[] = {0, id};
    const std::string text = tokenizer.decode(pair);
    const uint64_t bytes = text.size();
    hash.update(&bytes, sizeof bytes);
    hash.update(text.data(), text.size());
  }
  return to_string(hash.digest());
}

void check_meaning(const Options& o, const io::Metadata& saved, const io::Metadata& mine,
                   const std::string& where) {
  check_vocabulary(o, saved, mine, where);
  const std::string classes = find(saved, "classes"), my_classes = find(mine, "classes");
  if (!classes.empty() && !my_classes.empty())
    check_list(o, "class", where, lines_of(classes), lines_of(my_classes),
               "give the classes that the model was trained with");
}

void check_weights(const Options& o, const Task& task) {
  check_meaning(o, saved_metadata(o.weights), metadata_of(task), "--weights " + o.weights);
}

void check_intact(const std::string& weights) {
  const io::SafetensorsSet set = io::SafetensorsSet::open(weights);
  for (const io::SafetensorsFile& file : set.files()) {
    const std::string stored = find(file.metadata(), io::kHashKey);
    if (stored.empty()) continue;
    const std::string actual = file.compute_hash();
    TESSERA_CHECK(actual == stored,
                  "train: --weights {}: the tensors hash to {}, {} to {} when they were written; "
                  "the file is damaged, take another copy",
                  quote(file.path()), actual, io::kHashKey, quote(stored));
  }
}

void check_resumes(const Options& o, const Task& task, const io::Metadata& saved,
                   const std::string& folder) {
  auto same = [&](const char* flag, const std::string& mine) {
    const std::string was = find(saved, fmt::format("train.{}", flag));
    TESSERA_CHECK(was.empty() || was == mine,
                  "train: --resume: {0} was saved with --{1} {2}, this run has --{1} {3}; give "
                  "--{1} {2}, or another --checkpoint folder",
                  folder, flag, was, mine);
  };
  same("model", o.model), same("optimizer", o.optimizer);
  io::Metadata of_model;
  constexpr std::string_view kPrefix = "metadata.";
  for (const auto& [key, value] : saved)
    if (key.starts_with(kPrefix)) of_model.emplace(key.substr(kPrefix.size()), value);
  const io::Metadata mine = metadata_of(task);
  check_meaning(o, of_model, mine, folder);
  check_options(of_model, mine, folder);
}

}  // namespace tessera::train
