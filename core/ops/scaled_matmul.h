// The product of two matrices of 8-bit floats (E4M3, E5M2), each of which stands for its values
// times one scale, as PyTorch's torch._scaled_mm. nn::convert_to_fp8 (core/nn/fp8.h) trains with
// it.
#pragma once
#include "core/primitive/registry.h"

namespace tessera {

/// (a b^T) scale_a scale_b + bias, [M, N] of dtype `out`: a [M, K] and b [N, K] are f8e4m3 or
/// f8e5m2, not both the latter (no card multiplies two of these); scales [] and bias
/// [N] are floats, and `out` is f32, bf16 or f16. Sums and what follows them are computed in f32.
///
/// On cards from capability 8.9 on, cuBLASLt computes it. It takes K and N that are multiples of
/// 16; where they are not, operands are copied with zeros behind them, and the result where N is
/// not. On older cards the operands are widened to bf16, which holds their values, and our own
/// kernels multiply them. CPUs multiply in f32. It has no derivative: backward through it throws
/// NotDifferentiable.
Tensor scaled_matmul(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                     DType out, const Tensor& bias = {});

/// The op of the same product that adds a bias, its last operand; null for other ops and for one
/// that adds one already. The compiler makes it, for cards that add a bias for nothing.
PrimRef scaled_matmul_with_bias(const Primitive& prim);

}  // namespace tessera
