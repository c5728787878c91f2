// The graphs that Tessera has cuDNN compute: convolutions and attention. A problem is numbers
// alone, and equal bytes are equal problems.
#pragma once
#include "core/backend/cuda/cudnn/graph.h"

namespace tessera::cuda::dnn {

/// A convolution of x [N, C, places..] with w [O, C / groups, places..] to y [N, O, places..], all
/// channels-last, with two or three spatial dims; extents and window have zeros behind.
struct ConvProblem {
  ConvKind kind = ConvKind::kForward;
  int32_t type = kFloat;  // of all three
  int32_t spatial = 2;
  int32_t aligned_x = 16, aligned_w = 16, aligned_y = 16;
  int32_t aligned_beside = 16;  // operands that are as the result
  // y = (x * w - mean) / sqrt(var + eps) weight + bias + residual, then relu
  int32_t normalises = 0;
  int32_t weight = 0, bias = 0, residual = 0, relu = 0;  // which of these there are
  double eps = 0;
  // Sums over all but channels, f32: of the result y and of its squares; or, where x is the result,
  // of h and of h (of - mean), h being what is written: x + residual where y of the relu > 0, else
  // 0.
  int64_t statistics = 0;
  int64_t x[5] = {}, w[5] = {}, y[5] = {};
  int64_t begin[3] = {}, end[3] = {}, stride[3] = {}, dilation[3] = {};
};
struct ConvValues {
  static constexpr Graph::Value kX = 1, kW = 2, kY = 3, kSum = 4, kSquares = 5;
  // Of what normalises: mean, var, then weight, bias and residual where present. Of sums behind the
  // gradient of x: mean, of, then y of the relu and residual where present.
  static Graph::Value mean(const ConvProblem& p) { return p.statistics ? 6 : 4; }
};
Graph graph_of(const CudnnFunctions& f, const ConvProblem& p);
/// False where cuDNN is known to have no engine: for two sums behind the gradient of x where there
/// are strides, and for any where there are groups.
bool takes(const ConvProblem& p);

/// Strides of a [B, H, places, width] whose rows are dense.
struct HeadStrides {
  int64_t batch = 0, head = 0, place = 0;
};

/// Attention of q [B, H, T, D], k [B, H, S, D] and v [B, H, S, E] to out [B, H, T, E] and the log
/// of each row's sum of exponentials lse [B, H, T], which is dense and f32; and its gradient, by
/// the cotangent g of out. A mask, f32 and dense, is added to scores and has no -inf. What
/// out and lse are of a query that attends to no key means nothing; the gradient wants +inf for its
/// lse.
struct AttentionProblem {
  int32_t type = kBFloat16;
  int32_t causal = 0;  // a query sees the keys up to its own position
  int32_t gradient = 0;
  int32_t one_sum = 0;  // the gradient of q is summed in one piece, and so deterministic
  int64_t batch = 0, heads = 0, queries = 0, keys = 0, width = 0, value_width = 0;
  double scale = 1;
  HeadStrides q, k, v, out, g, dq, dk, dv;  // the last four are the gradient's
  int64_t mask[4] = {};  // its extents, which broadcast to [B, H, T, S]; zeros: no mask
};
struct AttentionValues {
  static constexpr Graph::Value kQ = 1, kK = 2, kV = 3, kOut = 4, kLse = 5;
  // The gradient's graph also has the cotangent, the results, and scratch, which the caller
  // allocates: rows, f32 [B, H, T], and unless one_sum the gradient of q in f32.
  static constexpr Graph::Value kG = 6, kDq = 7, kDk = 8, kDv = 9, kRows = 10, kWideDq = 11;
  static Graph::Value mask(const AttentionProblem& p) {
    return !p.gradient ? kG : p.one_sum ? kWideDq : kWideDq + 1;
  }
};
Graph graph_of(const CudnnFunctions& f, const AttentionProblem& p);

/// Whether cuDNN has engines for attention of such a shape: 16-bit floats, and heads of at most 128
/// whose width is a multiple of 8. `version` is the library's.
bool takes(const AttentionProblem& p, int version);
/// Whether attention by this version is known to be wrong, whatever its shape.
bool has_faulty_attention(int version);

}  // namespace tessera::cuda::dnn
