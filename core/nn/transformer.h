// The encoder and decoder of Vaswani et al. 2017 and their layers. Norms stand behind each part
// (post-norm) or before it (pre-norm). B batch, T tokens, S tokens of the encoder, D width.
#pragma once
#include "core/nn/attention.h"
#include "core/nn/containers.h"

namespace tessera::nn {

struct TransformerLayerOptions {
  int64_t dim = 0, heads = 0;
  int64_t hidden = 0;  // width of the feed-forward part; 0: 4 dim
  double dropout = 0.1;
  bool pre_norm = false;
  bool bias = true;
  double eps = 1e-5;
  Tensor (*activation)(Tensor) = tessera::relu;
};

/// x + attention, then x + linear2(activation(linear1)). Parameters are named as in PyTorch, those
/// of attention as in MultiheadAttention.
class TransformerEncoderLayer : public Module {
 public:
  explicit TransformerEncoderLayer(TransformerLayerOptions options);
  /// x [B, T, D] -> [B, T, D].
  Tensor operator()(const Tensor& x, const AttendOptions& attend);
  using Module::operator();
  const TransformerLayerOptions options;

 protected:
  Tensor forward(Tensor x) override { return run(std::move(x), {}); }

 private:
  Tensor run(Tensor x, const AttendOptions& attend);
  MultiheadAttentionPtr self_attn_;
  LinearPtr linear1_, linear2_;
  LayerNormPtr norm1_, norm2_;
  DropoutPtr dropout_;
};

/// Causal self-attention, attention to the encoder's `memory`, feed-forward.
class TransformerDecoderLayer : public Module {
 public:
  explicit TransformerDecoderLayer(TransformerLayerOptions options);
  /// x [B, T, D], memory [B, S, D] -> [B, T, D].
  Tensor operator()(const Tensor& x, const Tensor& memory,
                    const AttendOptions& self = {.causal = true}, const AttendOptions& cross = {});
  const TransformerLayerOptions options;

 private:
  Tensor run(Tensor x, const Tensor& memory, const AttendOptions& self, const AttendOptions& cross);
  MultiheadAttentionPtr self_attn_, cross_attn_;
  LinearPtr linear1_, linear2_;
  LayerNormPtr norm1_, norm2_, norm3_;
  DropoutPtr dropout_;
};

/// Encoder layers in a row, "layers.0" and so on; with `final_norm`, which pre-norm layers want, a
/// norm "norm" behind them.
class TransformerEncoder : public Module {
 public:
  TransformerEncoder(TransformerLayerOptions options, int64_t layers, bool final_norm = false);
  /// x [B, T, D] -> [B, T, D].
  Tensor operator()(const Tensor& x, const AttendOptions& attend);
  using Module::operator();

 protected:
  Tensor forward(Tensor x) override;

 private:
  std::shared_ptr<ModuleList<TransformerEncoderLayer>> layers_;
  LayerNormPtr norm_;  // null: none
};
/// Decoder layers in a row, with a norm as in TransformerEncoder.
class TransformerDecoder : public Module {
 public:
  TransformerDecoder(TransformerLayerOptions options, int64_t layers, bool final_norm = false);
  /// x [B, T, D], memory [B, S, D] -> [B, T, D].
  Tensor operator()(const Tensor& x, const Tensor& memory,
                    const AttendOptions& self = {.causal = true}, const AttendOptions& cross = {});

 private:
  std::shared_ptr<ModuleList<TransformerDecoderLayer>> layers_;
  LayerNormPtr norm_;  // null: none
};

std::shared_ptr<TransformerEncoder> transformer_encoder(TransformerLayerOptions options,
                                                        int64_t layers, bool final_norm = false);
std::shared_ptr<TransformerDecoder> transformer_decoder(TransformerLayerOptions options,
                                                        int64_t layers, bool final_norm = false);
std::shared_ptr<TransformerEncoderLayer> transformer_encoder_layer(TransformerLayerOptions options);
std::shared_ptr<TransformerDecoderLayer> transformer_decoder_layer(TransformerLayerOptions options);

}  // namespace tessera::nn
