// The rules of batching.cpp for single ops, those that axis maps cannot express.
#pragma once
#include <optional>

#include "core/autograd/level.h"
#include "core/tensor/wrapped.h"

namespace tessera::batching {

/// A call of an op at a level of vmap. Operands are of the level outside, some have the batch.
struct Call {
  const PrimRef& prim;
  std::span<Tensor> in;
  std::span<const bool> batched;
  int64_t size;  // samples
  Randomness randomness;
};

/// Results, as tensors of the level outside; where `batched`, dim 0 is the batch.
struct Result {
  Tensors out;
  bool batched;
};

/// A random op, drawn as Call::randomness says. Throws UserError for kError. nullopt: each sample
/// on its own.
std::optional<Result> random_draws(const Call& c);
/// Attention or its gradient with dropout, of which the same holds. nullopt: decomposed.
std::optional<Result> dropped_attention(const Call& c);
/// The other ops that have a rule; nullopt for ops without one.
std::optional<Result> by_rule(const Call& c);

/// `prim` for operands [size, ..]: attributes that name dims are moved by one, and extents of a
/// whole shape get `size` in front. Whether this is the op on the batch, axis maps tell.
PrimRef leading_dim_primitive(const Primitive& prim, int64_t size);
/// True where `t` is a shape without values: an operand of a vjp that the vjp does not read.
inline bool is_shape_only(const Tensor& t) {
  const Tensor& at = innermost(t);
  return !at.storage() && !at.is_sharded();
}
/// `t`, which is the same for each sample, expanded to the batch in a new dim 0.
Tensor with_batch(const Tensor& t, int64_t size);

}  // namespace tessera::batching
