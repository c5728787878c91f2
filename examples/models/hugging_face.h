// Folders as Hugging Face's transformers writes them, config.json beside model.safetensors (or its
// shards), for GPT-2 and BERT. A config that asks for what these models do not compute is refused
// by the name of its field; nothing in it is ignored that would change results.
#pragma once
#include <string>
#include <vector>

#include "core/io/safetensors.h"
#include "examples/models/bert.h"
#include "examples/models/gpt.h"

namespace tessera::models {

/// A folder with a config.json.
bool is_hugging_face(const std::string& path);
/// The options that the folder's config describes. Throws UserError naming the folder and the field
/// when the model is of another kind ("model_type") or computes otherwise.
GptOptions gpt_from_hugging_face(const std::string& folder);
BertOptions bert_from_hugging_face(const std::string& folder);
/// The folder's weights under this program's names, in its order and in f32, but for what is no
/// weight of its own: copies of tied weights, masks and position numbers.
std::vector<NamedTensor> load_hugging_face(const std::string& folder);
/// Loads them into `model` as its load_state does: names that differ are an error. But where BERT's
/// pooler or its head for next sentences is in the files and not in the model (a BertForMaskedLM),
/// it is left out; returns the names of what was, and logs them in one warning, of rank 0.
/// To fill a part of a model give its load_state the list above, not strictly.
std::vector<std::string> load_hugging_face(nn::Module& model, const std::string& folder);

/// Throws UserError for a Gpt without biases: GPT-2 has them.
void check_can_save(const GptOptions& options, const std::string& folder);
/// Writes config.json and model.safetensors into `folder`, which is made: transformers loads it as
/// GPT2LMHeadModel (BertForMaskedLM). `metadata` goes along with the weights; transformers passes
/// it over. Throws UserError for what check_can_save refuses.
void save_hugging_face(const std::string& folder, const GptOptions& options,
                       std::vector<NamedTensor> state, const io::Metadata& metadata = {});
void save_hugging_face(const std::string& folder, const BertOptions& options,
                       std::vector<NamedTensor> state, const io::Metadata& metadata = {});

}  // namespace tessera::models
