// Contractions. `contract` (einsum of two operands) is the one matmul primitive: every letter is a
// loop, its vjp is itself. matmul, linear and einsum are spellings of it. f32 and bf16 run in
// oneDNN, f64 in BLAS, f16 is computed in f32.
#pragma once
#include <string_view>

#include "core/primitive/registry.h"

namespace tessera {

/// "btk,nk->btn": letters missing from the result are summed. Each letter at most once per operand;
/// every letter of the result appears in an operand. Throws ShapeError when extents of a letter
/// differ.
Tensor contract(std::string_view spec, const Tensor& a, const Tensor& b);
/// Any number of operands, contracted from left to right; repeated letters in one operand are
/// refused.
Tensor einsum(std::string_view spec, std::span<const Tensor> operands);

/// NumPy's matmul: [.., M, K] x [.., K, N] -> [.., M, N], batch dims broadcast; 1-d operands are
/// vectors.
Tensor matmul(const Tensor& a, const Tensor& b);
/// x [.., K], weight [N, K] -> [.., N], plus bias [N] where given.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {});
/// a [.., N] and b [.., N] -> [..].
Tensor dot(const Tensor& a, const Tensor& b);

void register_contract_ops(OpRegistry& registry);

}  // namespace tessera
