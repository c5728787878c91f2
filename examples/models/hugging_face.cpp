// In GPT-2's files, linears are stored [in, out], and queries, keys and values [3, heads, width];
// BERT's names and layouts are the same as ours.
#include "examples/models/hugging_face.h"

#include <fmt/ranges.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "collectives/store/environment.h"
#include "core/autograd/autograd.h"
#include "core/base/log.h"
#include "core/io/bounded_json.h"
#include "core/io/file.h"
#include "core/io/safetensors.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"

namespace tessera::models {
namespace {

using nlohmann::json;
constexpr uint64_t kMaxConfig = 1 << 20;  // bytes
constexpr int kMaxDepth = 64;             // of what is nested in it
constexpr int64_t kMaxCount = INT32_MAX;  // products of two must not overflow
constexpr std::string_view kPrefix = "transformer.";

std::string config_path(const std::string& folder) {
  return (std::filesystem::path(folder) / "config.json").string();
}

// The fields of a config.json; errors name the file's path.
class Config {
 public:
  explicit Config(const std::string& folder)
      : path_(config_path(folder)),
        fields_(json::parse(
            io::read_file(path_, "weights", kMaxConfig),
            io::nested_at_most(kMaxDepth, fmt::format("weights: {}", io::quote(path_))), false)) {
    TESSERA_CHECK(fields_.is_object(), "weights: {} is no JSON object", io::quote(path_));
  }

  std::string kind() const { return text("model_type", ""); }
  void expect_kind(const std::string& kind) const {
    TESSERA_CHECK(this->kind() == kind, "weights: {}: model_type is \"{}\", the model is {}",
                  io::quote(path_), this->kind(), kind);
  }
  int64_t count(const char* name) const {
    const json* v = find(name);
    TESSERA_CHECK(
        v && v->is_number_integer() && v->get<int64_t>() > 0 && v->get<int64_t>() <= kMaxCount,
        "weights: {}: {} is {}; expected an integer from 1 to {}", io::quote(path_), name,
        v ? v->dump() : "missing", kMaxCount);
    return v->get<int64_t>();
  }
  double real(const char* name, double otherwise) const {
    const json* v = find(name);
    TESSERA_CHECK(!v || v->is_number(), "weights: {}: {} is {}; expected a number",
                  io::quote(path_), name, v->dump());
    return v ? v->get<double>() : otherwise;
  }
  bool flag(const char* name, bool otherwise) const {
    const json* v = find(name);
    TESSERA_CHECK(!v || v->is_boolean(), "weights: {}: {} is {}; expected true or false",
                  io::quote(path_), name, v->dump());
    return v ? v->get<bool>() : otherwise;
  }
  std::string text(const char* name, const char* otherwise) const {
    const json* v = find(name);
    TESSERA_CHECK(!v || v->is_string(), "weights: {}: {} is {}; expected a text", io::quote(path_),
                  name, v->dump());
    return v ? v->get<std::string>() : otherwise;
  }
  /// Throws unless a field has the one value that this model supports; a missing field has it.
  void expect(const char* name, const json& value) const {
    const json* v = find(name);
    TESSERA_CHECK(!v || *v == value, "weights: {}: {} is {}; this model computes only {}",
                  io::quote(path_), name, v->dump(), value.dump());
  }

 private:
  const json* find(const char* name) const {  // null where missing or null
    auto it = fields_.find(name);
    return it == fields_.end() || it->is_null() ? nullptr : &*it;
  }
  std::string path_;
  json fields_;
};

bool ends_with_any(std::string_view name, std::initializer_list<std::string_view> ends) {
  for (std::string_view e : ends)
    if (name.ends_with(e)) return true;
  return false;
}

bool stored_transposed(std::string_view name) {
  return ends_with_any(
      name, {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"});
}

Tensor turned(const Tensor& t) {
  TESSERA_CHECK_AS(ShapeError, t.ndim() == 2, "weights: a GPT-2 matrix is {}; expected 2 dims",
                   to_string(t.shape()));
  return contiguous(transpose(t, 0, 1));
}

std::vector<NamedTensor> as_f32(std::vector<NamedTensor> state) {
  for (NamedTensor& t : state)
    if (is_floating(t.tensor.dtype())) t.tensor = cast(t.tensor, kF32);
  return state;
}

std::vector<NamedTensor> gpt_state(std::vector<NamedTensor> state, const GptOptions& o) {
  std::vector<NamedTensor> out;
  for (NamedTensor& t : state) {
    if (t.name.starts_with(kPrefix)) t.name.erase(0, kPrefix.size());
    if (ends_with_any(t.name, {".attn.bias", ".attn.masked_bias"})) continue;  // causal masks
    if (t.name == "lm_head.weight" && o.tied) continue;
    if (stored_transposed(t.name)) t.tensor = turned(t.tensor);
    out.push_back(std::move(t));
  }
  return from_gpt2_order(std::move(out), o.heads);
}

std::vector<NamedTensor> bert_state(std::vector<NamedTensor> state) {
  std::vector<NamedTensor> out;
  for (NamedTensor& t : state) {
    if (ends_with_any(t.name, {"embeddings.position_ids", "predictions.decoder.weight",
                               "predictions.decoder.bias"}))
      continue;
    // Folders from before transformers 1 keep TensorFlow's names, as bert-base-uncased does.
    if (t.name.ends_with("LayerNorm.gamma")) t.name.replace(t.name.size() - 5, 5, "weight");
    if (t.name.ends_with("LayerNorm.beta")) t.name.replace(t.name.size() - 4, 4, "bias");
    out.push_back(std::move(t));
  }
  return out;
}

// True for tensors of a BERT trained for next sentences that masked language modelling does not
// use.
bool for_next_sentences(std::string_view name) {
  return name.starts_with("bert.pooler.") || name.starts_with("cls.seq_relationship.");
}

void save(const std::string& folder, const json& config, std::span<const NamedTensor> state,
          io::Metadata metadata) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  TESSERA_CHECK(!error, "save: cannot make the folder {}: {}", io::quote(folder), error.message());
  metadata["format"] = "pt";
  io::save_safetensors((std::filesystem::path(folder) / "model.safetensors").string(), state,
                       metadata);
  io::write_file(config_path(folder), config.dump(2) + "\n", "save");
}

}  // namespace

bool is_hugging_face(const std::string& path) {
  return !path.empty() && std::filesystem::is_regular_file(config_path(path));
}

GptOptions gpt_from_hugging_face(const std::string& folder) {
  Config c(folder);
  c.expect_kind("gpt2");
  GptOptions o;
  o.vocab = c.count("vocab_size"), o.context = c.count("n_positions");
  o.layers = c.count("n_layer"), o.heads = c.count("n_head"), o.dim = c.count("n_embd");
  o.bias = true, o.tied = c.flag("tie_word_embeddings", true);
  o.dropout = c.real("resid_pdrop", 0.1);
  for (const char* other : {"embd_pdrop", "attn_pdrop"})
    TESSERA_CHECK(
        c.real(other, o.dropout) == o.dropout,
        "weights: {}: {} is {} beside a resid_pdrop of {}, but this model has one rate of "
        "dropout; make them equal in config.json (only training uses them)",
        io::quote(config_path(folder)), other, c.real(other, o.dropout), o.dropout);
  std::string gelu = c.text("activation_function", "gelu_new");
  o.tanh_gelu = gelu != "gelu";
  if (o.tanh_gelu && gelu != "gelu_pytorch_tanh") c.expect("activation_function", "gelu_new");
  c.expect("n_inner", 4 * o.dim), c.expect("layer_norm_epsilon", 1e-5);
  c.expect("scale_attn_weights", true), c.expect("scale_attn_by_inverse_layer_idx", false);
  c.expect("add_cross_attention", false);
  return o;
}

BertOptions bert_from_hugging_face(const std::string& folder) {
  Config c(folder);
  c.expect_kind("bert");
  BertOptions o;
  o.vocab = c.count("vocab_size"), o.context = c.count("max_position_embeddings");
  o.segments = c.count("type_vocab_size"), o.layers = c.count("num_hidden_layers");
  o.heads = c.count("num_attention_heads"), o.dim = c.count("hidden_size");
  o.hidden = c.count("intermediate_size"), o.eps = c.real("layer_norm_eps", 1e-12);
  o.dropout = c.real("hidden_dropout_prob", 0.1);
  o.attention_dropout = c.real("attention_probs_dropout_prob", 0.1);
  c.expect("hidden_act", "gelu"), c.expect("position_embedding_type", "absolute");
  c.expect("is_decoder", false), c.expect("add_cross_attention", false);
  c.expect("tie_word_embeddings", true);
  return o;
}

std::vector<NamedTensor> load_hugging_face(const std::string& folder) {
  NoGrad off;
  const std::string kind = Config(folder).kind();
  std::vector<NamedTensor> state = as_f32(io::load_safetensors(folder));
  if (kind == "gpt2") return gpt_state(std::move(state), gpt_from_hugging_face(folder));
  bert_from_hugging_face(folder);  // checks the rest of the config
  return bert_state(std::move(state));
}

std::vector<std::string> load_hugging_face(nn::Module& model, const std::string& folder) {
  std::set<std::string> own;
  for (const nn::Slot& s : model.slots()) own.insert(s.name);
  std::vector<NamedTensor> state = load_hugging_face(folder);
  std::vector<std::string> left_out;
  std::erase_if(state, [&](const NamedTensor& t) {
    const bool unused = for_next_sentences(t.name) && !own.contains(t.name);
    if (unused) left_out.push_back(t.name);
    return unused;
  });
  model.load_state(state);
  if (!left_out.empty() && job_environment().rank == 0)
    logging::warn("weights: {}: {} has no place for {}: left out", io::quote(folder),
                  model.type_name(), fmt::join(left_out, ", "));
  return left_out;
}

void check_can_save(const GptOptions& o, const std::string& folder) {
  TESSERA_CHECK(o.bias,
                "save: {}: Hugging Face's GPT-2 has biases, this model has none; train it with "
                "--set bias=true, or save a file that ends in .safetensors",
                io::quote(folder));
}

void save_hugging_face(const std::string& folder, const GptOptions& o,
                       std::vector<NamedTensor> state, const io::Metadata& metadata) {
  NoGrad off;
  check_can_save(o, folder);
  state = to_gpt2_order(std::move(state), o.heads);
  for (NamedTensor& t : state) {
    if (stored_transposed(t.name)) t.tensor = turned(t.tensor);
    if (t.name != "lm_head.weight") t.name.insert(0, kPrefix);
  }
  save(folder,
       {{"architectures", {"GPT2LMHeadModel"}},
        {"model_type", "gpt2"},
        {"vocab_size", o.vocab},
        {"n_positions", o.context},
        {"n_layer", o.layers},
        {"n_head", o.heads},
        {"n_embd", o.dim},
        {"activation_function", o.tanh_gelu ? "gelu_new" : "gelu"},
        {"resid_pdrop", o.dropout},
        {"embd_pdrop", o.dropout},
        {"attn_pdrop", o.dropout},
        {"layer_norm_epsilon", 1e-5},
        {"tie_word_embeddings", o.tied},
        {"bos_token_id", nullptr},
        {"eos_token_id", nullptr},
        {"dtype", "float32"}},
       state, metadata);
}

void save_hugging_face(const std::string& folder, const BertOptions& o,
                       std::vector<NamedTensor> state, const io::Metadata& metadata) {
  save(folder,
       {{"architectures", {"BertForMaskedLM"}},
        {"model_type", "bert"},
        {"vocab_size", o.vocab},
        {"max_position_embeddings", o.context},
        {"type_vocab_size", o.segments},
        {"num_hidden_layers", o.layers},
        {"num_attention_heads", o.heads},
        {"hidden_size", o.dim},
        {"intermediate_size", o.hidden},
        {"hidden_act", "gelu"},
        {"hidden_dropout_prob", o.dropout},
        {"attention_probs_dropout_prob", o.attention_dropout},
        {"layer_norm_eps", o.eps},
        {"tie_word_embeddings", true},
        {"dtype", "float32"}},
       state, metadata);
}

}  // namespace tessera::models
