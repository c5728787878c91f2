#include "core/nn/attention.h"

#include <cmath>

#include "core/ops/fused.h"
#include "core/ops/views.h"

namespace tessera::nn {
namespace {

// The mask that both masks make together, broadcasting to [B, H, Tq, Tk].
Tensor joined_mask(const AttendOptions& o) {
  if (!o.key_mask.defined()) return o.mask;
  TESSERA_CHECK(o.key_mask.ndim() == 2 && o.key_mask.dtype() == kBool,
                "multihead_attention: key_mask is {}; give bool [B, Tk]", describe(o.key_mask));
  Tensor keys = unsqueeze(unsqueeze(o.key_mask, 1), 1);
  if (!o.mask.defined()) return keys;
  TESSERA_CHECK(
      o.mask.dtype() == kBool,
      "multihead_attention: key_mask cannot join the float mask {}; add -inf to the mask itself",
      describe(o.mask));
  return logical_and(o.mask, keys);
}

}  // namespace

Tensor split_heads(const Tensor& x, int64_t heads) {
  return permute(reshape(x, {x.size(0), x.size(1), heads, x.size(2) / heads}), {0, 2, 1, 3});
}

Tensor merge_heads(const Tensor& x) {
  return reshape(permute(x, {0, 2, 1, 3}), {x.size(0), x.size(2), x.size(1) * x.size(3)});
}

MultiheadAttention::MultiheadAttention(MultiheadAttentionOptions o) : options(o) {
  TESSERA_CHECK(o.dim > 0 && o.heads > 0 && o.dim % o.heads == 0,
                "multihead_attention: dim={} is not a multiple of heads={}", o.dim, o.heads);
  int64_t key_dim = o.key_dim ? o.key_dim : o.dim, value_dim = o.value_dim ? o.value_dim : o.dim;
  {
    SkipInit drawn_below;
    q_proj = register_module("q_proj", linear({o.dim, o.dim, o.bias}));
    k_proj = register_module("k_proj", linear({key_dim, o.dim, o.bias}));
    v_proj = register_module("v_proj", linear({value_dim, o.dim, o.bias}));
    out_proj = register_module("out_proj", linear({o.dim, o.dim, o.bias}));
  }
  draw();
}

void MultiheadAttention::reset(const InitKeys& keys) {
  out_proj->reset(keys.child("out_proj"));
  // PyTorch draws the three as one [3 D, D] matrix where they have equal widths.
  bool packed = k_proj->options.in == options.dim && v_proj->options.in == options.dim;
  double gain = packed ? std::sqrt(0.5) : 1;
  for (auto& [name, proj] : {std::pair{"q_proj", q_proj}, {"k_proj", k_proj}, {"v_proj", v_proj}})
    xavier_uniform_(proj->weight, gain, keys.child(name).key("weight"));
  for (auto& proj : {q_proj, k_proj, v_proj, out_proj})
    if (proj->bias.defined()) zeros_(proj->bias);
}

Tensor MultiheadAttention::operator()(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const AttendOptions& o) {
  Tensor in[] = {query, key, value};
  return call(in, [&] { return attend(in[0], in[1], in[2], o); });
}

Tensor MultiheadAttention::attend(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const AttendOptions& o) {
  TESSERA_CHECK_AS(ShapeError, query.ndim() == 3 && key.ndim() == 3 && value.ndim() == 3,
                   "multihead_attention: query {}, key {}, value {}; each is [B, T, D]",
                   tessera::describe(query), tessera::describe(key), tessera::describe(value));
  Tensor q = split_heads((*q_proj)(query), options.heads);
  Tensor k = split_heads((*k_proj)(key), options.heads);
  Tensor v = split_heads((*v_proj)(value), options.heads);
  Tensor y = scaled_dot_product_attention(
      q, k, v,
      {.mask = joined_mask(o), .causal = o.causal, .dropout = training() ? options.dropout : 0.0});
  return (*out_proj)(merge_heads(y));
}

std::string MultiheadAttention::describe() const {
  return fmt::format("dim={}, heads={}, dropout={}", options.dim, options.heads, options.dropout);
}

MultiheadAttentionPtr multihead_attention(MultiheadAttentionOptions o) {
  return std::make_shared<MultiheadAttention>(o);
}

}  // namespace tessera::nn
