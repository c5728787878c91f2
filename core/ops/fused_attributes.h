// Attributes of the fused ops, as kernels read them.
#pragma once
#include <span>

#include "core/ops/create_attributes.h"
#include "core/primitive/attributes.h"
#include "core/tensor/tensor.h"

namespace tessera {

struct CrossEntropyAttributes {
  int64_t ignore_index = 0;
  bool mean = false, with_grad = false;
  static void fields(auto& a, auto& f) {
    f.any("ignore_index", a.ignore_index), f("mean", a.mean), f("with_grad", a.with_grad);
  }
};

/// Operands x, then weight and bias where the op has them.
struct NormAttributes {
  double eps = 0;
  bool centred = true;  // which op it is; false: rms-norm
  bool has_weight = false, has_bias = false;
  static void fields(auto& a, auto& f) {
    f("eps", a.eps), f("has_weight", a.has_weight), f("has_bias", a.has_bias);
  }
};

/// Rows `begin` to `begin + rows` of a table of `extent` rows; ids outside of them give zeros.
struct EmbeddingAttributes {
  int64_t rows = 0;
  int64_t padding_idx = -1;       // -1: none
  int64_t begin = 0, extent = 0;  // extent 0: not split
  static void fields(auto& a, auto& f) {
    f("rows", a.rows), f.any("padding_idx", a.padding_idx), f("begin", a.begin);
    f("extent", a.extent);
  }
};

/// Operands q [B, H, T, D], k [B, H, S, D] and v [B, H, S, E], then a mask where the op has one:
/// bool (true: attend) or floats that are added to scores, four dims of 1 or those of [B, H, T, S].
/// Floats below kLeastMask mean that the query does not attend to the key: if all numbers of a row
/// were that low, f32 could not hold the log of how many they are beside them.
///
/// Where `drop.p` is not 0, the weights [B, H, T, S] go through the op dropout of these attributes
/// before they meet v, and its operands come last: the key and, where `drop.by_sample`, numbers.
struct AttentionAttributes {
  static constexpr float kLeastMask = -60000;  // above the lowest f16
  double scale = 1;
  bool causal = false, has_mask = false;
  DropoutAttributes drop = {};
  bool drops() const { return drop.p > 0; }
  /// Operands that come last, which not every such op has.
  int further() const { return has_mask + drops() + drop.by_sample; }
  /// Bit i: of `count` operands, kernels read number i densely, since it is the key or the numbers.
  uint32_t dense_draw(size_t count) const {
    return drops() ? ~0u << (count - 1 - drop.by_sample) : 0;
  }
  static void fields(auto& a, auto& f) {
    f("scale", a.scale), f("causal", a.causal), f("has_mask", a.has_mask);
    f.optional("dropout", a.drop.p), f.optional("by_sample", a.drop.by_sample);
    f.optional("begin", a.drop.begin), f.optional("global", a.drop.global);
  }
};
/// The last operands of attention or its gradient, undefined where the op has none.
struct AttentionFurther {
  Tensor mask, key, samples;
  AttentionFurther(const AttentionAttributes& a, std::span<const Tensor> in) {
    in = in.last(size_t(a.further()));
    if (a.has_mask) mask = in[0];
    if (a.drops()) key = in[size_t(a.has_mask)];
    if (a.drop.by_sample) samples = in.back();
  }
};
/// Where the words of weights [B, H, T, S] lie in the draw of dropout: those of head (b, h) from
/// first(b, h) on, of one query from the next `query` apart, keys as neighbours. The upper half of
/// the counter is ~0 or, by sample, the number of sample b / rows.
struct DrawnWeights {
  int64_t rows = 0, batch = 0, head = 0, query = 0, begin = 0;
  DrawnWeights() = default;
  DrawnWeights(const DropoutAttributes& a, const Shape& weights, int64_t samples) {
    const Strides steps = contiguous_strides(a.global.empty() ? weights : a.global);
    batch = steps[0], head = steps[1], query = steps[2];
    for (int d = a.by_sample; d < a.begin.size(); ++d) begin += a.begin[d] * steps[d];
    if (a.by_sample && samples > 0) rows = weights[0] / samples;
  }
  int64_t first(int64_t b, int64_t h) const {
    return begin + (rows ? b % rows : b) * batch + h * head;
  }
};

/// A result [B, H, T, D] of attention lies as [B, T, H, D] where the operand `like` has its heads
/// inside its positions, so that merging heads again is a view.
inline void lie_as_heads(const Meta& like, Meta& result) {
  const Shape& s = result.shape;
  if (like.strides[1] < like.strides[2])
    result.strides = {s[1] * s[2] * s[3], s[3], s[1] * s[3], 1};
}

}  // namespace tessera
