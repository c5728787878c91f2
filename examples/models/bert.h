// BERT (Devlin et al. 2019): post-norm encoder layers over word, position and segment embeddings,
// with heads for masked language modelling and classification. Parameters have Hugging Face's
// names, so its weights load unchanged. B batch, T tokens, D width, H heads, V vocabulary.
#pragma once
#include <string>
#include <string_view>

#include "core/nn/nn.h"
#include "examples/models/options.h"
#include "parallel/tensor_parallel.h"

namespace tessera::models {

struct BertOptions {
  int64_t vocab = 30522, context = 512, segments = 2;
  int64_t layers = 12, heads = 12, dim = 768, hidden = 3072;
  double dropout = 0.1;            // of embeddings and both branches of a layer
  double attention_dropout = 0.1;  // of attention weights
  double eps = 1e-12;              // of norms
};
/// 12 layers, 12 heads, width 768: 109,482,240 parameters with the pooler, 109,514,298 as a masked
/// language model.
BertOptions bert_base();
/// 24 layers, 16 heads, width 1024: 335,141,888 and 335,174,458.
BertOptions bert_large();
/// 4 layers, 4 heads, width 256 (Turc et al. 2019).
BertOptions bert_mini();
/// Lists every field by its name.
Fields fields_of(BertOptions& options);
/// Sets the field `key` from text. Throws UserError that lists the fields, or names the value that
/// does not parse.
void set_option(BertOptions& options, std::string_view key, std::string_view value);

/// The part of a Bert to build: layers [begin, end), and the embeddings if it begins at 0.
struct BertPart {
  int64_t begin = 0, end = 0;
};

class BertEmbeddings final : public nn::Module {
 public:
  /// `only_words`: only the word embeddings, for a head that shares them in a part that does not
  /// embed.
  explicit BertEmbeddings(const BertOptions& options, bool only_words = false);
  /// ids, segments [B, T] i64 (segments undefined: all 0) -> [B, T, D].
  Tensor operator()(const Tensor& ids, const Tensor& segments);
  using nn::Module::operator();
  const nn::EmbeddingPtr& words() const { return word_embeddings_; }

 protected:
  Tensor forward(Tensor ids) override { return embed(ids, {}); }

 private:
  Tensor embed(const Tensor& ids, const Tensor& segments);
  const int64_t context_;
  nn::EmbeddingPtr word_embeddings_, position_embeddings_, token_type_embeddings_;
  nn::LayerNormPtr norm_;
  nn::DropoutPtr dropout_;
};

/// The projections of queries, keys and values, and what they attend to.
class BertSelfAttention final : public nn::Module {
 public:
  explicit BertSelfAttention(const BertOptions& options);
  /// x [B, T, D], key_mask bool [B, T] (true: attended; undefined: all) -> [B, T, D].
  Tensor operator()(const Tensor& x, const Tensor& key_mask);
  using nn::Module::operator();

 protected:
  Tensor forward(Tensor x) override { return attend(x, {}); }

 private:
  Tensor attend(const Tensor& x, const Tensor& key_mask);
  const int64_t heads_;
  const double dropout_p_;
  nn::LinearPtr query_, key_, value_;
};

/// The end of a branch: norm(x + dropout(dense(branch))).
class BertOutput final : public nn::Module {
 public:
  BertOutput(int64_t in, const BertOptions& options);
  Tensor operator()(const Tensor& branch, const Tensor& x);

 private:
  nn::LinearPtr dense_;
  nn::LayerNormPtr norm_;
  nn::DropoutPtr dropout_;
};

class BertLayer final : public nn::Module {
 public:
  explicit BertLayer(const BertOptions& options);
  Tensor operator()(const Tensor& x, const Tensor& key_mask);
  using nn::Module::operator();

 protected:
  Tensor forward(Tensor x) override { return run(x, {}); }

 private:
  Tensor run(const Tensor& x, const Tensor& key_mask);
  std::shared_ptr<BertSelfAttention> self_;
  std::shared_ptr<BertOutput> attention_output_, output_;
  nn::LinearPtr intermediate_;
};

struct BertInputs {
  Tensor ids;       // [B, T] i64, T at most the context; for a later part: [B, T, D]
  Tensor segments;  // [B, T] i64 in [0, segments); undefined: all 0
  Tensor key_mask;  // [B, T] bool, false at padding; undefined: all true
};

/// Returns [B, T, D]. `pooler`: adds the layer over the first token that classifiers read. A part
/// takes and returns activations [B, T, D] where it is cut; its parameters have the names and
/// initial values that they have in the whole model. `words`: adds the word embeddings to a part
/// that does not begin the model.
class Bert final : public nn::Module {
 public:
  explicit Bert(const BertOptions& options, bool pooler = true)
      : Bert(options, {0, options.layers}, pooler) {}
  Bert(const BertOptions& options, BertPart part, bool pooler, bool words = false);
  Tensor operator()(const BertInputs& inputs);
  using nn::Module::operator();
  /// Computes tanh(dense(first token)): x [B, T, D] -> [B, D].
  Tensor pool(const Tensor& x_BTD);
  BertEmbeddings& embeddings() { return *embeddings_; }
  void reset(const nn::InitKeys& keys) override;
  const BertOptions options;
  const BertPart part;

 protected:
  Tensor forward(Tensor ids) override {
    return run({.ids = std::move(ids), .segments = {}, .key_mask = {}});
  }

 private:
  Tensor run(const BertInputs& inputs);
  std::shared_ptr<BertEmbeddings> embeddings_;
  std::shared_ptr<nn::ModuleList<BertLayer>> layer_;
  nn::LinearPtr pooler_;
};

/// ids [B, T] -> logits [B, T, V]; the head uses the matrix of the word embeddings. A part has the
/// head if it ends at the last layer; otherwise it takes and returns what a part of a Bert does.
class BertForMaskedLM final : public nn::Module {
 public:
  explicit BertForMaskedLM(const BertOptions& options)
      : BertForMaskedLM(options, {0, options.layers}) {}
  BertForMaskedLM(const BertOptions& options, BertPart part);
  Tensor operator()(const BertInputs& inputs);
  using nn::Module::operator();
  void reset(const nn::InitKeys& keys) override;
  const BertOptions options;

 protected:
  Tensor forward(Tensor ids) override { return finished((*bert_)(std::move(ids))); }

 private:
  Tensor finished(Tensor x) { return has_head() ? head(std::move(x)) : x; }
  bool has_head() const { return bert_->part.end == options.layers; }
  Tensor head(Tensor x_BTD);
  std::shared_ptr<Bert> bert_;
  nn::LinearPtr transform_;  // null where there is no head
  nn::LayerNormPtr transform_norm_;
  Tensor bias_;  // [V]
};

/// ids [B, T] -> logits [B, classes].
class BertForSequenceClassification final : public nn::Module {
 public:
  BertForSequenceClassification(const BertOptions& options, int64_t classes);
  Tensor operator()(const BertInputs& inputs);
  using nn::Module::operator();
  void reset(const nn::InitKeys& keys) override;

 protected:
  Tensor forward(Tensor ids) override { return head((*bert_)(std::move(ids))); }

 private:
  Tensor head(Tensor x_BTD);
  std::shared_ptr<Bert> bert_;
  nn::DropoutPtr dropout_;
  nn::LinearPtr classifier_;
};

using BertForMaskedLMPtr = std::shared_ptr<BertForMaskedLM>;
BertForMaskedLMPtr bert_for_masked_lm(const BertOptions& options);
/// Makes stage `stage` of a masked language model cut by layers (parallel::stage_range). The first
/// and the last stage each have a copy of the word embeddings, which the pipeline must know: .tied
/// = {kBertWords}. Masks and segments are given to every stage. Throws UserError for more stages
/// than layers.
BertForMaskedLMPtr bert_stage(const BertOptions& options, int stage, int stages);
inline constexpr const char* kBertWords = "bert.embeddings.word_embeddings.weight";
std::shared_ptr<BertForSequenceClassification> bert_for_sequence_classification(
    const BertOptions& options, int64_t classes);

/// Cuts attention by heads and feed-forward by its inner width; embeddings and head stay whole.
parallel::ParallelPlan tensor_parallel_plan(const BertOptions& options);

}  // namespace tessera::models
