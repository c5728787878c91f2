// Multi-head attention (Vaswani et al. 2017) with separate projections, which tensor parallelism
// can cut by heads. B batch, T tokens (Tq of queries, Tk of keys), D width, H heads, W = D / H.
#pragma once
#include "core/nn/layers.h"

namespace tessera::nn {

struct MultiheadAttentionOptions {
  int64_t dim = 0, heads = 0;
  int64_t key_dim = 0, value_dim = 0;  // widths of key and value inputs; 0: dim
  double dropout = 0;                  // of the attention weights, while training
  bool bias = true;
};

struct AttendOptions {
  bool causal = false;   // position i attends to j <= i
  Tensor mask = {};      // bool (true: attend) or float (added), broadcasts to [B, H, Tq, Tk]
  Tensor key_mask = {};  // bool [B, Tk], true where a key is real; excludes a float mask
};

/// Parameters q_proj, k_proj, v_proj (xavier-uniform weights, as PyTorch draws its packed one) and
/// out_proj; biases zero.
class MultiheadAttention : public Module {
 public:
  explicit MultiheadAttention(MultiheadAttentionOptions options);
  MultiheadAttention(int64_t dim, int64_t heads)
      : MultiheadAttention(MultiheadAttentionOptions{dim, heads}) {}
  /// query [B, Tq, D], key [B, Tk, key_dim], value [B, Tk, value_dim] -> [B, Tq, D].
  Tensor operator()(const Tensor& query, const Tensor& key, const Tensor& value,
                    const AttendOptions& options = {});
  /// Self-attention, as operator()(x) with options.
  Tensor operator()(const Tensor& x, const AttendOptions& options) {
    return (*this)(x, x, x, options);
  }
  using Module::operator();
  std::string describe() const override;
  void reset(const InitKeys& keys) override;

  LinearPtr q_proj, k_proj, v_proj, out_proj;
  const MultiheadAttentionOptions options;

 protected:
  Tensor forward(Tensor x) override { return attend(x, x, x, {}); }

 private:
  Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value,
                const AttendOptions& options);
};

using MultiheadAttentionPtr = std::shared_ptr<MultiheadAttention>;
MultiheadAttentionPtr multihead_attention(MultiheadAttentionOptions options);

/// [B, T, H W] -> [B, H, T, W], a view.
Tensor split_heads(const Tensor& x, int64_t heads);
/// Back again, a copy.
Tensor merge_heads(const Tensor& x);

}  // namespace tessera::nn
