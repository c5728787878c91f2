// GPT-2 (Radford et al. 2019): pre-norm blocks, learned positions, causal attention, residual
// projections initialised with a smaller deviation. Parameters have GPT-2's names without the
// prefix "transformer.". B batch, T tokens, D width, H heads, W = D / H, V vocabulary.
#pragma once
#include <string>
#include <string_view>

#include "core/nn/nn.h"
#include "examples/models/options.h"
#include "parallel/tensor_parallel.h"

namespace tessera::models {

struct GptOptions {
  int64_t vocab = 65, context = 64;
  int64_t layers = 4, heads = 4, dim = 128;
  double dropout = 0;      // of embeddings, attention weights and both residual branches
  bool bias = false;       // in linears and norms
  bool tanh_gelu = false;  // the approximation that GPT-2 was trained with; false: erf
  bool tied = true;        // the head shares wte.weight
};
/// 4 layers, 4 heads, width 128, context 64.
GptOptions gpt_nano();
/// GPT-2 as published: 12 layers, 12 heads, width 768, context 1024; 124,439,808 parameters.
GptOptions gpt2();
/// Lists every field by its name.
Fields fields_of(GptOptions& options);
/// Sets the field `key` from text. Throws UserError that lists the fields, or names the value that
/// does not parse.
void set_option(GptOptions& options, std::string_view key, std::string_view value);

class GptAttention final : public nn::Module {
 public:
  explicit GptAttention(const GptOptions& options);

 protected:
  Tensor forward(Tensor x) override;

 private:
  const int64_t heads_;
  const double dropout_p_;
  // The rows of c_attn are ordered [H, 3, W], so that a cut by heads is a cut by rows.
  nn::LinearPtr c_attn_, c_proj_;
  nn::DropoutPtr dropout_;
};

class GptMlp final : public nn::Module {
 public:
  explicit GptMlp(const GptOptions& options);

 protected:
  Tensor forward(Tensor x) override;

 private:
  const bool tanh_gelu_;
  nn::LinearPtr c_fc_, c_proj_;
  nn::DropoutPtr dropout_;
};

class GptBlock final : public nn::Module {
 public:
  explicit GptBlock(const GptOptions& options);

 protected:
  Tensor forward(Tensor x) override;

 private:
  nn::LayerNormPtr ln_1_, ln_2_;
  std::shared_ptr<GptAttention> attn_;
  std::shared_ptr<GptMlp> mlp_;
};

/// The part of a Gpt to build: blocks [begin, end), the embeddings if it begins at 0, the final
/// norm and the head if it ends at the last block.
struct GptPart {
  int64_t begin = 0, end = 0;
};

/// ids [B, T] i64, T at most the context -> logits [B, T, V]. A part takes and returns activations
/// [B, T, D] where it is cut; its parameters have the names and initial values that they have in
/// the whole model.
class Gpt final : public nn::Module {
 public:
  explicit Gpt(const GptOptions& options) : Gpt(options, {0, options.layers}) {}
  Gpt(const GptOptions& options, GptPart part);
  /// Returns the mean cross-entropy. ids, targets [B, T] i64.
  Tensor loss(const Tensor& ids, const Tensor& targets);
  void reset(const nn::InitKeys& keys) override;
  const GptOptions options;
  const GptPart part;

 protected:
  Tensor forward(Tensor x) override;

 private:
  bool embeds() const { return part.begin == 0; }
  bool has_head() const { return part.end == options.layers; }
  Tensor embed(Tensor ids);
  Tensor head(Tensor x_BTD);

  nn::EmbeddingPtr wte_, wpe_;
  nn::DropoutPtr drop_;
  std::shared_ptr<nn::ModuleList<GptBlock>> h_;
  nn::LayerNormPtr ln_f_;
  nn::LinearPtr lm_head_;  // null when tied
};
using GptPtr = std::shared_ptr<Gpt>;
GptPtr gpt(const GptOptions& options);
/// Makes stage `stage` of a Gpt cut by blocks (parallel::stage_range). With a tied head the first
/// and the last stage each have a copy of wte, which the pipeline must know: .tied =
/// {"wte.weight"}. Throws UserError for more stages than blocks.
GptPtr gpt_stage(const GptOptions& options, int stage, int stages);

/// Cuts attention by heads, feed-forward by its inner width, embedding and head by the vocabulary.
/// Logits are then cut by the vocabulary, which a loss supports in a LossParallel scope; under
/// exact contraction a vocabulary that is no multiple of kExactLeaves stays whole. With
/// `sequence_parallel`, norms and dropouts between the regions run on a part of the sequence.
parallel::ParallelPlan tensor_parallel_plan(const GptOptions& options,
                                            bool sequence_parallel = false);

/// GPT-2's files order the rows of c_attn (weight and bias) [3, H, W]. These functions permute all
/// c_attn of a state to the order of this model and back; other tensors stay as they are.
std::vector<NamedTensor> from_gpt2_order(std::vector<NamedTensor> state, int64_t heads);
std::vector<NamedTensor> to_gpt2_order(std::vector<NamedTensor> state, int64_t heads);

struct GenerateOptions {
  int64_t tokens = 100;
  double temperature = 1;  // 0: always take the likeliest
  int64_t top_k = 0;       // draw among the k likeliest; 0: all
  uint64_t key = 0;        // of the draws; the same key gives the same text
};
/// Continues `prompt`, which must have at least one id, by options.tokens ids; the model sees as
/// many of the last ones as its context holds.
std::vector<int64_t> generate(Gpt& model, std::vector<int64_t> prompt,
                              GenerateOptions options = {});

}  // namespace tessera::models
