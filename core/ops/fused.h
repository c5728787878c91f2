// Fused ops of neural networks: one kernel each where a device has one, a decomposition into
// ordinary ops where not. 16-bit floats are computed in f32 inside.
#pragma once
#include <optional>

#include "core/primitive/registry.h"

namespace tessera {

/// exp(x - max) / sum over `dim`, maybe 0 below 2^-126; all -inf gives NaN, as in PyTorch.
Tensor softmax(const Tensor& x, int64_t dim = -1);
Tensor log_softmax(const Tensor& x, int64_t dim = -1);

enum class Reduction : uint8_t { kMean, kSum, kNone };
struct CrossEntropyOptions {
  int64_t ignore_index = -100;             // targets that count for nothing
  double label_smoothing = 0;              // Szegedy et al. 2016
  Reduction reduction = Reduction::kMean;  // the mean is over targets that count
  Tensor weight = {};               // [V], per class; the mean then divides by the weights' sum
  std::optional<int64_t> dim = {};  // of the classes; none: as classes_last
};
/// -log softmax(logits)[target]. logits [N, V, ..] or [V] floats, classes in dim 1 or the only one,
/// as in PyTorch; [B, T, V] takes {.dim = -1}. targets [N, ..] integers, the shape of logits
/// without the classes, or floats of the shape of logits, a distribution over the classes for each
/// row: then the loss is -sum(target log softmax(logits)), differentiable in the targets too, and
/// the mean is over all rows, whatever the weights.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets,
                     const CrossEntropyOptions& options = {});

/// `x` as a view whose last dim is `dim`, that of the classes. Without `dim`: dim 1 of three dims
/// or more, else the last. Throws ShapeError, which begins with `op`, where x has no such dim.
Tensor classes_last(const char* op, const Tensor& x, std::optional<int64_t> dim = {});

/// (x - mean) / sqrt(var + eps) * weight + bias over the last dim. weight, bias [D], either may be
/// undefined. Ba, Kiros, Hinton 2016.
Tensor layer_norm(const Tensor& x, const Tensor& weight = {}, const Tensor& bias = {},
                  double eps = 1e-5);
/// x / sqrt(mean(x^2) + eps) * weight over the last dim. Zhang, Sennrich 2019.
Tensor rms_norm(const Tensor& x, const Tensor& weight = {}, double eps = 1e-5);

/// Rows of `table` [V, D] at `ids` [..] (i64 or i32) -> [.., D]. Row `padding_idx` gets no gradient
/// (-1: none). Throws UserError naming the id and V when one is out of range.
Tensor embedding(const Tensor& ids, const Tensor& table, int64_t padding_idx = -1);

enum class AttentionKernel : uint8_t { kAuto, kFlash, kPlain };
struct AttentionOptions {
  // Bool (true: attend) or float (added), broadcasts to [B, H, Tq, Tk]. Floats below -60000 count
  // as -inf. A query that may attend to no key gives zeros.
  Tensor mask = {};
  bool causal = false;  // position i attends to j <= i
  double scale = 0;     // 0: 1 / sqrt(D)
  // Probability that a weight is dropped, in [0, 1]; the others are divided by 1 - p. Which are is
  // what tessera::dropout of the weights [B, H, Tq, Tk] drops, whatever kernel computes, with one
  // key of default_generator() and the numbers of a SampleScope (core/ops/random.h).
  double dropout = 0;
  // k and v may have fewer heads than q. Each of their heads then serves as many neighbouring heads
  // of q as the quotient is (grouped-query attention, Ainslie et al. 2023).
  bool enable_gqa = false;
  AttentionKernel kernel = AttentionKernel::kAuto;
};
/// dropout(softmax(q k^T scale + mask)) v. q [B, H, Tq, D], k [B, H, Tk, D], v [B, H, Tk, Dv] ->
/// [B, H, Tq, Dv], all with B or without. The flash kernel works in tiles and never holds [Tq, Tk]
/// (Dao et al. 2022), except in backward where a float mask requires a gradient: that of the mask
/// is computed by ordinary ops, in the dtype of q. kAuto chooses it where no operand is empty.
/// Throws ShapeError for shapes that do not fit, and UserError for operands that are not floats of
/// one dtype, masks of integers, dropout outside of [0, 1], and kFlash for empty operands.
Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const AttentionOptions& options = {});

}  // namespace tessera
