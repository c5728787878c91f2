#include "examples/models/gpt.h"

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/nn/attention.h"
#include "core/ops/contract.h"
#include "core/ops/fused.h"
#include "core/ops/views.h"
#include "examples/models/hugging_face.h"
#include "examples/models/options.h"
#include "examples/models/registry.h"
#include "parallel/stage.h"

namespace tessera::models {

GptOptions gpt_nano() { return {}; }

GptOptions gpt2() {
  return {.vocab = 50257,
          .context = 1024,
          .layers = 12,
          .heads = 12,
          .dim = 768,
          .bias = true,
          .tanh_gelu = true};
}

Fields fields_of(GptOptions& o) {
  return {"gpt",
          {{"vocab", &o.vocab},
           {"context", &o.context},
           {"layers", &o.layers},
           {"heads", &o.heads},
           {"dim", &o.dim},
           {"dropout", &o.dropout},
           {"bias", &o.bias},
           {"tanh_gelu", &o.tanh_gelu},
           {"tied", &o.tied}}};
}

void set_option(GptOptions& o, std::string_view key, std::string_view value) {
  set_field(fields_of(o), key, value);
}

// ---- attention: x_BTD -> c_attn -> q, k, v [B, H, T, W] -> c_proj

GptAttention::GptAttention(const GptOptions& o) : heads_(o.heads), dropout_p_(o.dropout) {
  c_attn_ = register_module("c_attn", nn::linear({o.dim, 3 * o.dim, o.bias}));
  c_proj_ = register_module("c_proj", nn::linear({o.dim, o.dim, o.bias}));
  dropout_ = register_module("resid_dropout", nn::dropout(o.dropout));
}

Tensor GptAttention::forward(Tensor x) {
  int64_t B = x.size(0), T = x.size(1), D = x.size(2), W = D / heads_;
  Tensor qkv_BTH3W = reshape((*c_attn_)(std::move(x)), {B, T, heads_, 3, W});
  Tensors parts = unbind(qkv_BTH3W, 3);
  qkv_BTH3W = {};
  for (Tensor& part : parts) part = permute(part, {0, 2, 1, 3});  // [B, H, T, W]
  Tensor y_BHTW = scaled_dot_product_attention(
      parts[0], parts[1], parts[2], {.causal = true, .dropout = training() ? dropout_p_ : 0.0});
  return (*dropout_)((*c_proj_)(nn::merge_heads(y_BHTW)));
}

// ---- feed-forward and block

GptMlp::GptMlp(const GptOptions& o) : tanh_gelu_(o.tanh_gelu) {
  c_fc_ = register_module("c_fc", nn::linear({o.dim, 4 * o.dim, o.bias}));
  c_proj_ = register_module("c_proj", nn::linear({4 * o.dim, o.dim, o.bias}));
  dropout_ = register_module("dropout", nn::dropout(o.dropout));
}

Tensor GptMlp::forward(Tensor x) {
  Tensor h = (*c_fc_)(std::move(x));
  h = tanh_gelu_ ? gelu_tanh(std::move(h)) : gelu(std::move(h));
  return (*dropout_)((*c_proj_)(std::move(h)));
}

GptBlock::GptBlock(const GptOptions& o) {
  ln_1_ = register_module("ln_1", nn::layer_norm({.dim = o.dim, .bias = o.bias}));
  attn_ = register_module("attn", std::make_shared<GptAttention>(o));
  ln_2_ = register_module("ln_2", nn::layer_norm({.dim = o.dim, .bias = o.bias}));
  mlp_ = register_module("mlp", std::make_shared<GptMlp>(o));
}

Tensor GptBlock::forward(Tensor x) {
  Tensor branch = (*attn_)((*ln_1_)(x));
  x = add(std::move(x), std::move(branch));
  branch = (*mlp_)((*ln_2_)(x));
  return add(std::move(x), std::move(branch));
}

// ---- the model

Gpt::Gpt(const GptOptions& o, GptPart p) : options(o), part(p) {
  TESSERA_CHECK(o.layers > 0 && o.heads > 0 && o.context > 0 && o.vocab > 0 && o.dim > 0,
                "gpt: layers={}, heads={}, dim={}, context={} and vocab={} must be positive",
                o.layers, o.heads, o.dim, o.context, o.vocab);
  TESSERA_CHECK(o.dim % o.heads == 0, "gpt: dim={} is not a multiple of heads={}", o.dim, o.heads);
  TESSERA_CHECK(0 <= p.begin && p.begin < p.end && p.end <= o.layers,
                "gpt: blocks [{}, {}) are no part of {} layers", p.begin, p.end, o.layers);
  {
    nn::SkipInit drawn_below;
    if (embeds() || (has_head() && o.tied))
      wte_ = register_module("wte", nn::embedding(o.vocab, o.dim));
    if (embeds()) {
      wpe_ = register_module("wpe", nn::embedding(o.context, o.dim));
      drop_ = register_module("drop", nn::dropout(o.dropout));
    }
    h_ = register_module("h", nn::module_list<GptBlock>(size_t(p.begin)));
    for (int64_t i = p.begin; i < p.end; ++i) h_->push_back(std::make_shared<GptBlock>(o));
    if (has_head()) {
      ln_f_ = register_module("ln_f", nn::layer_norm({.dim = o.dim, .bias = o.bias}));
      if (!o.tied) lm_head_ = register_module("lm_head", nn::linear({o.dim, o.vocab, false}));
    }
  }
  draw();
}

void Gpt::reset(const nn::InitKeys& keys) {
  double residual = 0.02 / std::sqrt(2.0 * double(options.layers));
  for (auto& [name, p] : named_parameters()) {
    if (p.ndim() == 2)
      nn::normal_(p, 0, name.ends_with("c_proj.weight") ? residual : 0.02, keys.key(name));
    else
      nn::constant_(p, name.ends_with(".weight") ? 1 : 0);
  }
}

Tensor Gpt::embed(Tensor ids) {
  TESSERA_CHECK_AS(ShapeError, ids.ndim() == 2 && ids.size(1) <= options.context,
                   "gpt: ids are {}; give [B, T] with T at most the context {}",
                   tessera::describe(ids), options.context);
  Tensor positions_TD = slice(wpe_->weight, 0, 0, ids.size(1));
  return (*drop_)((*wte_)(std::move(ids)) + std::move(positions_TD));
}

Tensor Gpt::head(Tensor x_BTD) {
  x_BTD = (*ln_f_)(std::move(x_BTD));
  if (lm_head_) return (*lm_head_)(std::move(x_BTD));
  nn::Scope scope("lm_head");
  return tessera::linear(x_BTD, wte_->weight);
}

Tensor Gpt::forward(Tensor x) {
  if (embeds()) x = embed(std::move(x));
  for (GptBlock& block : *h_) x = block(std::move(x));
  return has_head() ? head(std::move(x)) : x;
}

Tensor Gpt::loss(const Tensor& ids, const Tensor& targets) {
  Tensor logits_BTV = (*this)(ids);
  nn::Scope scope("loss");
  return cross_entropy(logits_BTV, targets, {.dim = -1});
}

GptPtr gpt(const GptOptions& options) { return std::make_shared<Gpt>(options); }

GptPtr gpt_stage(const GptOptions& options, int stage, int stages) {
  parallel::StageRange r = parallel::stage_range(options.layers, stage, stages);
  return std::make_shared<Gpt>(options, GptPart{r.begin, r.end});
}

// ---- the order of rows in files

namespace {

std::vector<NamedTensor> permute_qkv(std::vector<NamedTensor> state, int64_t outer, int64_t inner) {
  NoGrad off;
  for (NamedTensor& t : state) {
    if (t.name.find("c_attn.") == std::string::npos) continue;
    Shape rows = t.tensor.shape();
    TESSERA_CHECK_AS(ShapeError, rows[0] % (outer * inner) == 0,
                     "gpt: {} has {} rows, not a multiple of 3 times the heads", t.name, rows[0]);
    Tensor split = unflatten(t.tensor, 0, {outer, inner, rows[0] / (outer * inner)});
    t.tensor = reshape(transpose(split, 0, 1), rows);
  }
  return state;
}

}  // namespace

std::vector<NamedTensor> from_gpt2_order(std::vector<NamedTensor> state, int64_t heads) {
  return permute_qkv(std::move(state), 3, heads);
}
std::vector<NamedTensor> to_gpt2_order(std::vector<NamedTensor> state, int64_t heads) {
  return permute_qkv(std::move(state), heads, 3);
}

// ---- how `train` and `bench` see it

parallel::ParallelPlan tensor_parallel_plan(const GptOptions& o, bool sequence_parallel) {
  namespace p = parallel;
  int64_t head_width = o.dim / o.heads;
  Placement between = sequence_parallel ? Shard(1) : Replicate();
  // A vocabulary that exact contraction could not share bit for bit stays whole.
  bool cut_vocabulary = !context().exact_contraction || o.vocab % kExactLeaves == 0;
  p::ParallelPlan plan{
      {"h.*.attn.c_attn", p::colwise({.unit = 3 * head_width})},  // rows are [heads, 3, width]
      {"h.*.attn.c_proj", p::rowwise({.unit = head_width, .output = between})},
      {"h.*.mlp.c_fc", p::colwise()},
      {"h.*.mlp.c_proj", p::rowwise({.output = between})},
  };
  if (sequence_parallel) {
    plan.emplace_back("h.*.ln_1", p::sequence_parallel());
    plan.emplace_back("h.*.ln_2", p::sequence_parallel());
    plan.emplace_back("ln_f", p::sequence_parallel(Replicate()));
  } else if (cut_vocabulary) {
    plan.emplace_back("ln_f", p::prepare_output());
  }
  if (cut_vocabulary) plan.emplace_back("wte", p::rowwise({.output = between}));
  if (cut_vocabulary && !o.tied) plan.emplace_back("lm_head", p::colwise());
  return plan;
}

std::vector<ModelSpec> gpt_models() {
  ModelSpec spec{
      .name = "gpt-nano", .options = gpt_nano(), .data = Data::kText, .make = on<GptOptions>(gpt)};
  spec.tensor_parallel = {
      .plan = on<GptOptions>([](const GptOptions& o) { return tensor_parallel_plan(o); }),
      .field = "heads",
      .parts = "heads"};
  spec.pipeline = {.stage = on<GptOptions>(gpt_stage),
                   .places = on<GptOptions>([](const GptOptions& o) { return o.layers; }),
                   .parts = "layers",
                   .remedy = [](int stages) { return fmt::format("--set layers={}", stages); },
                   .tied = on<GptOptions>([](const GptOptions& o) {
                     return o.tied ? std::vector<std::string>{"wte.weight"}
                                   : std::vector<std::string>();
                   })};
  spec.folder = {
      .read = [](ModelOptions& o,
                 const std::string& folder) { o.as<GptOptions>() = gpt_from_hugging_face(folder); },
      .check = on<GptOptions>(check_can_save),
      .write = on<GptOptions>([](const GptOptions& o, const std::string& folder,
                                 std::vector<NamedTensor> state, const io::Metadata& metadata) {
        save_hugging_face(folder, o, std::move(state), metadata);
      })};
  spec.generate = [](nn::Module& model, int64_t tokens, uint64_t key) {
    std::vector<int64_t> ids =
        generate(static_cast<Gpt&>(model), {0}, {.tokens = tokens, .temperature = 0.8, .key = key});
    return std::vector<int64_t>(ids.end() - tokens, ids.end());
  };
  spec.bench_batch_size = 12;
  ModelSpec published = spec;
  published.name = "gpt2", published.options = gpt2(), published.bench_batch_size = 1;
  return {spec, published};
}

}  // namespace tessera::models
