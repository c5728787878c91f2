#include "core/nn/transformer.h"

namespace tessera::nn {
namespace {

MultiheadAttentionPtr attention_of(const TransformerLayerOptions& o) {
  return multihead_attention(
      {.dim = o.dim, .heads = o.heads, .dropout = o.dropout, .bias = o.bias});
}
LayerNormPtr norm_of(const TransformerLayerOptions& o) {
  return layer_norm({.dim = o.dim, .eps = o.eps, .bias = o.bias});
}
int64_t hidden_of(const TransformerLayerOptions& o) { return o.hidden ? o.hidden : 4 * o.dim; }

// x + f(norm(x)), or norm(x + f(x)).
template <class F>
Tensor residual(Tensor x, LayerNorm& norm, Dropout& dropout, bool pre_norm, F f) {
  if (pre_norm) return add(x, dropout(f(norm(x))));
  return norm(add(x, dropout(f(x))));
}

}  // namespace

TransformerEncoderLayer::TransformerEncoderLayer(TransformerLayerOptions o) : options(o) {
  self_attn_ = register_module("self_attn", attention_of(o));
  linear1_ = register_module("linear1", linear({o.dim, hidden_of(o), o.bias}));
  linear2_ = register_module("linear2", linear({hidden_of(o), o.dim, o.bias}));
  norm1_ = register_module("norm1", norm_of(o));
  norm2_ = register_module("norm2", norm_of(o));
  dropout_ = register_module("dropout", nn::dropout(o.dropout));
}

Tensor TransformerEncoderLayer::forward(const Tensor& x, const AttendOptions& attend) {
  Tensor in[] = {x};
  return call(in, [&] { return run(in[0], attend); });
}

Tensor TransformerEncoderLayer::run(Tensor x, const AttendOptions& attend) {
  x = residual(std::move(x), *norm1_, *dropout_, options.pre_norm,
               [&](const Tensor& h) { return self_attn_->forward(h, attend); });
  return residual(std::move(x), *norm2_, *dropout_, options.pre_norm, [&](const Tensor& h) {
    return (*linear2_)((*dropout_)(options.activation((*linear1_)(h))));
  });
}

TransformerDecoderLayer::TransformerDecoderLayer(TransformerLayerOptions o) : options(o) {
  self_attn_ = register_module("self_attn", attention_of(o));
  cross_attn_ = register_module("multihead_attn", attention_of(o));
  linear1_ = register_module("linear1", linear({o.dim, hidden_of(o), o.bias}));
  linear2_ = register_module("linear2", linear({hidden_of(o), o.dim, o.bias}));
  norm1_ = register_module("norm1", norm_of(o));
  norm2_ = register_module("norm2", norm_of(o));
  norm3_ = register_module("norm3", norm_of(o));
  dropout_ = register_module("dropout", nn::dropout(o.dropout));
}

Tensor TransformerDecoderLayer::forward(const Tensor& x, const Tensor& memory,
                                        const AttendOptions& self, const AttendOptions& cross) {
  Tensor in[] = {x, memory};
  return call(in, [&] { return run(in[0], in[1], self, cross); });
}

Tensor TransformerDecoderLayer::run(Tensor x, const Tensor& memory, const AttendOptions& self,
                                    const AttendOptions& cross) {
  x = residual(std::move(x), *norm1_, *dropout_, options.pre_norm,
               [&](const Tensor& h) { return self_attn_->forward(h, self); });
  x = residual(std::move(x), *norm2_, *dropout_, options.pre_norm,
               [&](const Tensor& h) { return cross_attn_->forward(h, memory, memory, cross); });
  return residual(std::move(x), *norm3_, *dropout_, options.pre_norm, [&](const Tensor& h) {
    return (*linear2_)((*dropout_)(options.activation((*linear1_)(h))));
  });
}

std::shared_ptr<TransformerEncoderLayer> transformer_encoder_layer(TransformerLayerOptions o) {
  return std::make_shared<TransformerEncoderLayer>(o);
}
std::shared_ptr<TransformerDecoderLayer> transformer_decoder_layer(TransformerLayerOptions o) {
  return std::make_shared<TransformerDecoderLayer>(o);
}

}  // namespace tessera::nn
