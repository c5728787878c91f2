// Reads and writes folders as Hugging Face's transformers does, config.json beside
// model.safetensors (or its shards), for GPT-2 and BERT. A config that requires something these
// models do not compute is refused with the name of its field; no field that would change results
// is ignored.
#pragma once
#include <string>
#include <vector>

#include "core/io/safetensors.h"
#include "examples/models/bert.h"
#include "examples/models/gpt.h"

namespace tessera::models {

/// True for a folder with a config.json.
bool is_hugging_face(const std::string& path);
/// Returns the options that the folder's config describes. Throws UserError that names the folder
/// and the field when the model is of another kind ("model_type") or computes something else.
GptOptions gpt_from_hugging_face(const std::string& folder);
BertOptions bert_from_hugging_face(const std::string& folder);
/// Returns the folder's weights under this program's names, in its order and in f32, without
/// tensors that are no weights of their own: copies of tied weights, masks and position numbers.
std::vector<NamedTensor> load_hugging_face(const std::string& folder);
/// Loads the folder's weights into `model` as its load_state does: names that differ are an error.
/// The exceptions are BERT's pooler and its head for next sentences: where the files have them and
/// the model does not (a BertForMaskedLM), they are left out. Returns the names of what was left
/// out, which rank 0 logs in one warning. To fill a part of a model, pass the list that the
/// function above returns to its load_state, not strictly.
std::vector<std::string> load_hugging_face(nn::Module& model, const std::string& folder);

/// Throws UserError for a Gpt without biases, since GPT-2 has them.
void check_can_save(const GptOptions& options, const std::string& folder);
/// Creates `folder` and writes config.json and model.safetensors, which transformers loads as
/// GPT2LMHeadModel (BertForMaskedLM). `metadata` is saved with the weights; transformers ignores
/// it. Throws UserError for what check_can_save refuses.
void save_hugging_face(const std::string& folder, const GptOptions& options,
                       std::vector<NamedTensor> state, const io::Metadata& metadata = {});
void save_hugging_face(const std::string& folder, const BertOptions& options,
                       std::vector<NamedTensor> state, const io::Metadata& metadata = {});

}  // namespace tessera::models
