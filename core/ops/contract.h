// Contractions. `contract` is the one matmul primitive: each letter of its spec is a loop, and its
// vjp is contractions again. matmul, linear and einsum (einsum.h) call it. f32 and bf16 run in
// oneDNN, f64 in BLAS, f16 is computed in f32.
#pragma once
#include <string_view>

#include "core/dispatch/scoped.h"
#include "core/primitive/registry.h"

namespace tessera {

/// Contractions made in this scope, and their gradients, sum in an order that ranks can share: the
/// summed loop is cut into kExactLeaves equal leaves (or, if that is less, the largest power of two
/// that divides it), and the sums of leaves are added in the balanced tree of an all-reduce. With
/// 2, 4 or 8 ranks that hold equal parts of the loop, each rank computes a subtree, so
/// tensor-parallel training has the bits of serial training. Put whole steps in the scope: the
/// global norm and cross-entropy read it too. For a whole run, set context().exact_contraction.
///
/// Several summed letters are one loop, the first of operand a outermost; only that one may be
/// split. A split inside a leaf, or into unequal parts, throws ShapeError on every rank. 16-bit
/// floats are summed in f32 and never split (terms would be rounded). Costs a tenth to a quarter of
/// the library's speed in f32 (AVX-512, one core: 95 GF/s of 107 for 2048 x 768 times 768 x 3072).
class ExactContraction {
 public:
  ExactContraction();

 private:
  Scoped<bool> on_;
};
inline constexpr int64_t kExactLeaves = 8;

/// "btk,nk->btn": letters missing from the result are summed. A letter occurs at most once per
/// operand; every letter of the result appears in an operand. Throws ShapeError when extents of a
/// letter differ.
Tensor contract(std::string_view spec, const Tensor& a, const Tensor& b);
/// NumPy's matmul: [.., M, K] x [.., K, N] -> [.., M, N], batch dims broadcast; 1-d operands are
/// vectors.
Tensor matmul(const Tensor& a, const Tensor& b);
/// x [.., K], weight [N, K] -> [.., N], plus bias [N] where given.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {});
/// a [.., N] and b [.., N] -> [..].
Tensor dot(const Tensor& a, const Tensor& b);

void register_contract_ops(OpRegistry& registry);

}  // namespace tessera
