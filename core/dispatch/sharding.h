// The sharding layer as the rest of the core sees it. Only dtensor, which implements this class,
// puts a shard slot into a tensor, so the layer needs no registration: it is found at the operand.
// Invariant: results of one op are sharded over the mesh of its operands.
// Internal: not part of the public interface.
#pragma once
#include "core/dispatch/dispatch.h"

namespace tessera {

class ShardingLayer : public ShardData {
 public:
  /// Runs `prim`, of whose operands at least one is sharded: converts operands without
  /// communication, runs this rank's part of the op and gives the results their placement. Throws
  /// ShardingError where it would have to communicate and may not.
  virtual Tensors run(const PrimRef& prim, Inputs in) const = 0;
  /// Called before the op is recorded. Reduces, by an op of its own, each operand that is a partial
  /// sum and that running `prim` would reduce by a collective. What is saved for backward then has
  /// the bits that the op saw (`x == amax(x)` finds its maximum), and is not reduced again.
  virtual void reduce_partials(const PrimRef& prim, Inputs in) const = 0;
  /// assign to sharded destinations: this rank's pieces take the values of its part of the op.
  virtual void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) const = 0;
  /// The result of a creation op (its operands, keys, have no dims that loops run over), placed
  /// like this payload and of the shape that it places; a partial sum here is Replicate there.
  virtual Tensor create(const PrimRef& prim, Inputs in) const = 0;
  /// A tensor of type `global` and this payload's placement whose local piece is `local`.
  virtual Tensor with_local(const Meta& global, Tensor local) const = 0;
  /// The cotangent `g` with the placement that the operand `forward` asks for: Shard stays Shard, a
  /// partial sum asks for Replicate, Replicate takes any placement. `forward` may be a plain
  /// tensor; then the result is one too.
  virtual Tensor pin_cotangent(const Tensor& forward, Tensor g) const = 0;
  /// The values, where every rank has all of them; throws ShardingError otherwise.
  virtual Tensor whole_value() const = 0;
};

/// The sharding of `t`, or of the tensor that `t` wraps inside of function transforms; null where
/// there is none. Null too for a sample of vmap: the dims of its placement are those of the batch.
const ShardingLayer* placing(const Tensor& t);
/// The sharding of `t` itself; null unless it is sharded.
inline const ShardingLayer* sharding_of(const Tensor& t) {
  return static_cast<const ShardingLayer*>(shard_data(t));
}
/// The first that is sharded among `tensors`; null when none is.
const ShardingLayer* find_sharding(std::span<const Tensor> tensors);
/// The entry of layer_functions.
Tensors sharding_layer(const PrimRef& prim, Inputs in);
/// A tensor with the shape, dtype and placement of `t`, and no values.
Tensor without_values(const Tensor& t);

}  // namespace tessera
