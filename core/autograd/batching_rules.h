// Batching of single ops, as batching.cpp uses it.
#pragma once
#include <optional>

#include "core/autograd/level.h"
#include "core/tensor/wrapped.h"

namespace tessera::batching {

/// A call at a level of vmap: operands of the level outside, some with the batch in dim 0.
struct Call {
  const PrimRef& prim;
  std::span<Tensor> in;
  std::span<const bool> batched;
  int64_t size;  // samples
  Randomness randomness;
};

/// Results of the level outside; `batched`: with the batch in dim 0.
struct Result {
  Tensors out;
  bool batched;
};

/// Draws as Call::randomness says; nothing for other ops. Throws UserError where it says kError.
std::optional<Result> random_draws(const Call& c);
/// The ops that axes cannot express; nothing for others.
std::optional<Result> by_rule(const Call& c);

/// `prim` with attributes that name dims moved by one, and extents of all dims with the batch in
/// front: the op on [size, ..], if it is one.
PrimRef leading_dim_primitive(const Primitive& prim, int64_t size);
/// True for the shape of an operand whose values a vjp does not read.
inline bool is_shape_only(const Tensor& t) {
  const Tensor& at = innermost(t);
  return !at.storage() && !at.is_sharded();
}
/// `t`, the same for each sample, seen with the batch in front.
Tensor with_batch(const Tensor& t, int64_t size);

}  // namespace tessera::batching
