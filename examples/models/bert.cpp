#include "examples/models/bert.h"

#include "core/nn/attention.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/views.h"
#include "examples/models/hugging_face.h"
#include "examples/models/options.h"
#include "examples/models/registry.h"
#include "parallel/stage.h"

namespace tessera::models {
namespace {

/// Draws BERT's initial values: normal with deviation 0.02, biases 0, norms 1.
void draw_as_bert(nn::Module& module, const nn::InitKeys& keys) {
  for (auto& [name, p] : module.named_parameters()) {
    if (p.ndim() == 2)
      nn::normal_(p, 0, 0.02, keys.key(name));
    else
      nn::constant_(p, name.ends_with("LayerNorm.weight") ? 1 : 0);
  }
}

nn::LayerNormPtr norm_of(const BertOptions& o) {
  return nn::layer_norm({.dim = o.dim, .eps = o.eps});
}

/// A module that only gives its child a name: "self", "dense".
class Named final : public nn::Module {
 public:
  template <class M>
  std::shared_ptr<M> add(std::string name, std::shared_ptr<M> module) {
    return register_module(std::move(name), std::move(module));
  }
};

}  // namespace

BertOptions bert_base() { return {}; }
BertOptions bert_large() { return {.layers = 24, .heads = 16, .dim = 1024, .hidden = 4096}; }
BertOptions bert_mini() { return {.layers = 4, .heads = 4, .dim = 256, .hidden = 1024}; }

Fields fields_of(BertOptions& o) {
  return {"bert",
          {{"vocab", &o.vocab},
           {"context", &o.context},
           {"segments", &o.segments},
           {"layers", &o.layers},
           {"heads", &o.heads},
           {"dim", &o.dim},
           {"hidden", &o.hidden},
           {"dropout", &o.dropout},
           {"attention_dropout", &o.attention_dropout},
           {"eps", &o.eps}}};
}

void set_option(BertOptions& o, std::string_view key, std::string_view value) {
  set_field(fields_of(o), key, value);
}

// ---- embeddings

BertEmbeddings::BertEmbeddings(const BertOptions& o, bool only_words) : context_(o.context) {
  word_embeddings_ = register_module("word_embeddings", nn::embedding(o.vocab, o.dim));
  if (only_words) return;
  position_embeddings_ = register_module("position_embeddings", nn::embedding(o.context, o.dim));
  token_type_embeddings_ =
      register_module("token_type_embeddings", nn::embedding(o.segments, o.dim));
  norm_ = register_module("LayerNorm", norm_of(o));
  dropout_ = register_module("dropout", nn::dropout(o.dropout));
}

Tensor BertEmbeddings::operator()(const Tensor& ids, const Tensor& segments) {
  Tensor in[] = {ids, segments};
  return call(in, [&] { return embed(in[0], in[1]); });
}

Tensor BertEmbeddings::embed(const Tensor& ids, const Tensor& segments) {
  TESSERA_CHECK_AS(ShapeError, ids.ndim() == 2 && ids.size(1) <= context_,
                   "bert: ids are {}; give [B, T] with T at most the context {}",
                   tessera::describe(ids), context_);
  Tensor positions_TD = slice(position_embeddings_->weight, 0, 0, ids.size(1));
  Tensor of_segment = segments.defined() ? (*token_type_embeddings_)(segments)
                                         : select(token_type_embeddings_->weight, 0, 0);
  Tensor x = (*word_embeddings_)(ids) + of_segment + positions_TD;
  return (*dropout_)((*norm_)(std::move(x)));
}

// ---- a layer

BertSelfAttention::BertSelfAttention(const BertOptions& o)
    : heads_(o.heads), dropout_p_(o.attention_dropout) {
  query_ = register_module("query", nn::linear(o.dim, o.dim));
  key_ = register_module("key", nn::linear(o.dim, o.dim));
  value_ = register_module("value", nn::linear(o.dim, o.dim));
}

Tensor BertSelfAttention::operator()(const Tensor& x, const Tensor& key_mask) {
  Tensor in[] = {x, key_mask};
  return call(in, [&] { return attend(in[0], in[1]); });
}

Tensor BertSelfAttention::attend(const Tensor& x, const Tensor& key_mask) {
  Tensor mask =
      key_mask.defined() ? unsqueeze(unsqueeze(key_mask, 1), 1) : Tensor();  // [B, 1, 1, T]
  Tensor y = scaled_dot_product_attention(nn::split_heads((*query_)(x), heads_),
                                          nn::split_heads((*key_)(x), heads_),
                                          nn::split_heads((*value_)(x), heads_),
                                          {.mask = mask, .dropout = training() ? dropout_p_ : 0.0});
  return nn::merge_heads(y);
}

BertOutput::BertOutput(int64_t in, const BertOptions& o) {
  dense_ = register_module("dense", nn::linear(in, o.dim));
  norm_ = register_module("LayerNorm", norm_of(o));
  dropout_ = register_module("dropout", nn::dropout(o.dropout));
}

Tensor BertOutput::operator()(const Tensor& branch, const Tensor& x) {
  Tensor in[] = {branch, x};
  return call(in, [&] { return (*norm_)((*dropout_)((*dense_)(in[0])) + in[1]); });
}

BertLayer::BertLayer(const BertOptions& o) {
  auto attention = register_module("attention", std::make_shared<Named>());
  self_ = attention->add("self", std::make_shared<BertSelfAttention>(o));
  attention_output_ = attention->add("output", std::make_shared<BertOutput>(o.dim, o));
  auto intermediate = register_module("intermediate", std::make_shared<Named>());
  intermediate_ = intermediate->add("dense", nn::linear(o.dim, o.hidden));
  output_ = register_module("output", std::make_shared<BertOutput>(o.hidden, o));
}

Tensor BertLayer::operator()(const Tensor& x, const Tensor& key_mask) {
  return call_owning({x, key_mask}, [this](Inputs in) { return run(in[0], in[1]); });
}

Tensor BertLayer::run(const Tensor& x, const Tensor& key_mask) {
  Tensor y = (*attention_output_)((*self_)(x, key_mask), x);
  return (*output_)(gelu((*intermediate_)(y)), y);
}

// ---- the encoder

Bert::Bert(const BertOptions& o, BertPart p, bool pooler, bool words) : options(o), part(p) {
  TESSERA_CHECK(
      o.layers > 0 && o.heads > 0 && o.context > 0 && o.vocab > 0 && o.dim > 0 && o.hidden > 0 &&
          o.segments > 0,
      "bert: layers={}, heads={}, dim={}, hidden={}, context={}, vocab={} and segments={} "
      "must be positive",
      o.layers, o.heads, o.dim, o.hidden, o.context, o.vocab, o.segments);
  TESSERA_CHECK(o.dim % o.heads == 0, "bert: dim={} is not a multiple of heads={}", o.dim, o.heads);
  TESSERA_CHECK(0 <= p.begin && p.begin < p.end && p.end <= o.layers,
                "bert: layers [{}, {}) are no part of {}", p.begin, p.end, o.layers);
  {
    nn::SkipInit drawn_below;
    if (p.begin == 0 || words)
      embeddings_ = register_module("embeddings", std::make_shared<BertEmbeddings>(o, p.begin > 0));
    auto encoder = register_module("encoder", std::make_shared<Named>());
    layer_ = encoder->add("layer", nn::module_list<BertLayer>(size_t(p.begin)));
    for (int64_t i = p.begin; i < p.end; ++i) layer_->push_back(std::make_shared<BertLayer>(o));
    if (pooler)
      pooler_ = register_module("pooler", std::make_shared<Named>())
                    ->add("dense", nn::linear(o.dim, o.dim));
  }
  draw();
}

void Bert::reset(const nn::InitKeys& keys) { draw_as_bert(*this, keys); }

Tensor Bert::operator()(const BertInputs& inputs) {
  Tensor in[] = {inputs.ids, inputs.segments, inputs.key_mask};
  return call(in, [&] { return run({in[0], in[1], in[2]}); });
}

Tensor Bert::run(const BertInputs& inputs) {
  Tensor x = part.begin == 0 ? (*embeddings_)(inputs.ids, inputs.segments) : inputs.ids;
  for (BertLayer& layer : *layer_) x = layer(x, inputs.key_mask);
  return x;
}

Tensor Bert::pool(const Tensor& x_BTD) {
  TESSERA_CHECK(pooler_, "bert: this model was built without its pooler");
  return tessera::tanh((*pooler_)(select(x_BTD, 1, 0)));
}

// ---- heads

BertForMaskedLM::BertForMaskedLM(const BertOptions& o, BertPart part) : options(o) {
  {
    nn::SkipInit drawn_below;
    bert_ = register_module("bert", std::make_shared<Bert>(o, part, false, part.end == o.layers));
    if (has_head()) {
      auto cls = register_module("cls", std::make_shared<Named>());
      auto predictions = cls->add("predictions", std::make_shared<Named>());
      predictions->register_parameter("bias", bias_, nn::empty_parameter({o.vocab}));
      auto transform = predictions->add("transform", std::make_shared<Named>());
      transform_ = transform->add("dense", nn::linear(o.dim, o.dim));
      transform_norm_ = transform->add("LayerNorm", norm_of(o));
    }
  }
  draw();
}

void BertForMaskedLM::reset(const nn::InitKeys& keys) { draw_as_bert(*this, keys); }

Tensor BertForMaskedLM::operator()(const BertInputs& inputs) {
  Tensor in[] = {inputs.ids, inputs.segments, inputs.key_mask};
  return call(in, [&] { return finished((*bert_)({in[0], in[1], in[2]})); });
}

Tensor BertForMaskedLM::head(Tensor x_BTD) {
  x_BTD = (*transform_norm_)(gelu((*transform_)(std::move(x_BTD))));
  nn::Scope scope("cls.predictions.decoder");
  return tessera::linear(x_BTD, bert_->embeddings().words()->weight, bias_);
}

BertForSequenceClassification::BertForSequenceClassification(const BertOptions& o,
                                                             int64_t classes) {
  TESSERA_CHECK(classes > 0, "bert: classes={} must be positive", classes);
  {
    nn::SkipInit drawn_below;
    bert_ = register_module("bert", std::make_shared<Bert>(o));
    dropout_ = register_module("dropout", nn::dropout(o.dropout));
    classifier_ = register_module("classifier", nn::linear(o.dim, classes));
  }
  draw();
}

void BertForSequenceClassification::reset(const nn::InitKeys& keys) { draw_as_bert(*this, keys); }

Tensor BertForSequenceClassification::operator()(const BertInputs& inputs) {
  Tensor in[] = {inputs.ids, inputs.segments, inputs.key_mask};
  return call(in, [&] { return head((*bert_)({in[0], in[1], in[2]})); });
}

Tensor BertForSequenceClassification::head(Tensor x_BTD) {
  return (*classifier_)((*dropout_)(bert_->pool(x_BTD)));
}

BertForMaskedLMPtr bert_for_masked_lm(const BertOptions& options) {
  return std::make_shared<BertForMaskedLM>(options);
}
BertForMaskedLMPtr bert_stage(const BertOptions& options, int stage, int stages) {
  const parallel::StageRange r = parallel::stage_range(options.layers, stage, stages);
  return std::make_shared<BertForMaskedLM>(options, BertPart{r.begin, r.end});
}
std::shared_ptr<BertForSequenceClassification> bert_for_sequence_classification(
    const BertOptions& options, int64_t classes) {
  return std::make_shared<BertForSequenceClassification>(options, classes);
}

// ---- how `train` and `bench` see it

parallel::ParallelPlan tensor_parallel_plan(const BertOptions& o) {
  namespace p = parallel;
  int64_t head_width = o.dim / o.heads;
  p::ParallelPlan plan;
  for (const char* name : {"query", "key", "value"})
    plan.emplace_back(fmt::format("bert.encoder.layer.*.attention.self.{}", name),
                      p::colwise({.unit = head_width}));
  plan.emplace_back("bert.encoder.layer.*.attention.output.dense",
                    p::rowwise({.unit = head_width}));
  plan.emplace_back("bert.encoder.layer.*.intermediate.dense", p::colwise());
  plan.emplace_back("bert.encoder.layer.*.output.dense", p::rowwise());
  return plan;
}

std::vector<ModelSpec> bert_models() {
  ModelSpec spec{.name = "bert-mini",
                 .options = bert_mini(),
                 .data = Data::kMaskedText,
                 .make = on<BertOptions>(bert_for_masked_lm)};
  spec.tensor_parallel = {
      .plan = on<BertOptions>([](const BertOptions& o) { return tensor_parallel_plan(o); }),
      .field = "heads",
      .parts = "heads"};
  spec.pipeline = {
      .stage = on<BertOptions>(bert_stage),
      .places = on<BertOptions>([](const BertOptions& o) { return o.layers; }),
      .parts = "layers",
      .remedy = [](int stages) { return fmt::format("--set layers={}", stages); },
      .tied = [](const ModelOptions&) { return std::vector<std::string>{kBertWords}; }};
  spec.folder = {
      .read =
          [](ModelOptions& o, const std::string& folder) {
            o.as<BertOptions>() = bert_from_hugging_face(folder);
          },
      .write = on<BertOptions>([](const BertOptions& o, const std::string& folder,
                                  std::vector<NamedTensor> state, const io::Metadata& metadata) {
        save_hugging_face(folder, o, std::move(state), metadata);
      })};
  spec.length = 128;
  ModelSpec base = spec, large = spec;
  base.name = "bert-base", base.options = bert_base();
  large.name = "bert-large", large.options = bert_large();
  return {spec, base, large};
}

}  // namespace tessera::models
