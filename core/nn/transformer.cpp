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

template <class Layer>
std::shared_ptr<ModuleList<Layer>> layers_of(const TransformerLayerOptions& o, int64_t count) {
  TESSERA_CHECK(count > 0, "transformer: {} layers; give at least 1", count);
  auto layers = module_list<Layer>();
  for (int64_t i = 0; i < count; ++i) layers->push_back(std::make_shared<Layer>(o));
  return layers;
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

Tensor TransformerEncoderLayer::operator()(const Tensor& x, const AttendOptions& attend) {
  Tensor in[] = {x};
  return call(in, [&] { return run(in[0], attend); });
}

Tensor TransformerEncoderLayer::run(Tensor x, const AttendOptions& attend) {
  x = residual(std::move(x), *norm1_, *dropout_, options.pre_norm,
               [&](const Tensor& h) { return (*self_attn_)(h, attend); });
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

Tensor TransformerDecoderLayer::operator()(const Tensor& x, const Tensor& memory,
                                           const AttendOptions& self, const AttendOptions& cross) {
  Tensor in[] = {x, memory};
  return call(in, [&] { return run(in[0], in[1], self, cross); });
}

Tensor TransformerDecoderLayer::run(Tensor x, const Tensor& memory, const AttendOptions& self,
                                    const AttendOptions& cross) {
  x = residual(std::move(x), *norm1_, *dropout_, options.pre_norm,
               [&](const Tensor& h) { return (*self_attn_)(h, self); });
  x = residual(std::move(x), *norm2_, *dropout_, options.pre_norm,
               [&](const Tensor& h) { return (*cross_attn_)(h, memory, memory, cross); });
  return residual(std::move(x), *norm3_, *dropout_, options.pre_norm, [&](const Tensor& h) {
    return (*linear2_)((*dropout_)(options.activation((*linear1_)(h))));
  });
}

TransformerEncoder::TransformerEncoder(TransformerLayerOptions o, int64_t layers, bool final_norm)
    : layers_(layers_of<TransformerEncoderLayer>(o, layers)) {
  register_module("layers", layers_);
  if (final_norm) norm_ = register_module("norm", norm_of(o));
}

Tensor TransformerEncoder::operator()(const Tensor& x, const AttendOptions& attend) {
  Tensor in[] = {x};
  return call(in, [&] {
    Tensor y = in[0];
    for (TransformerEncoderLayer& layer : *layers_) y = layer(y, attend);
    return norm_ ? (*norm_)(y) : y;
  });
}

// Layers called with one tensor may be computed again in backward.
Tensor TransformerEncoder::forward(Tensor x) {
  for (TransformerEncoderLayer& layer : *layers_) x = layer(x);
  return norm_ ? (*norm_)(x) : x;
}

TransformerDecoder::TransformerDecoder(TransformerLayerOptions o, int64_t layers, bool final_norm)
    : layers_(layers_of<TransformerDecoderLayer>(o, layers)) {
  register_module("layers", layers_);
  if (final_norm) norm_ = register_module("norm", norm_of(o));
}

Tensor TransformerDecoder::operator()(const Tensor& x, const Tensor& memory,
                                      const AttendOptions& self, const AttendOptions& cross) {
  Tensor in[] = {x, memory};
  return call(in, [&] {
    Tensor y = in[0];
    for (TransformerDecoderLayer& layer : *layers_) y = layer(y, in[1], self, cross);
    return norm_ ? (*norm_)(y) : y;
  });
}

std::shared_ptr<TransformerEncoder> transformer_encoder(TransformerLayerOptions o, int64_t layers,
                                                        bool final_norm) {
  return std::make_shared<TransformerEncoder>(o, layers, final_norm);
}
std::shared_ptr<TransformerDecoder> transformer_decoder(TransformerLayerOptions o, int64_t layers,
                                                        bool final_norm) {
  return std::make_shared<TransformerDecoder>(o, layers, final_norm);
}
std::shared_ptr<TransformerEncoderLayer> transformer_encoder_layer(TransformerLayerOptions o) {
  return std::make_shared<TransformerEncoderLayer>(o);
}
std::shared_ptr<TransformerDecoderLayer> transformer_decoder_layer(TransformerLayerOptions o) {
  return std::make_shared<TransformerDecoderLayer>(o);
}

}  // namespace tessera::nn
