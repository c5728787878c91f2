// The sharding layer as the rest of the core sees it. A tensor gets a shard slot only from the code
// that implements this (dtensor), so the layer needs no registration: the operand brings it along.
// Invariant: results of one op are sharded over the mesh of its operands.
// Internal: not part of the public interface.
#pragma once
#include "core/dispatch/dispatch.h"

namespace tessera {

class ShardingLayer : public ShardData {
 public:
  /// Runs `prim`, at least one of whose operands is sharded: conversions without communication,
  /// this rank's part of the op, results with their placement. Throws ShardingError where it would
  /// have to communicate and may not.
  virtual Tensors run(const PrimRef& prim, Inputs in) const = 0;
  /// Before the op is recorded: operands that are sums still to be reduced, and that it will reduce
  /// by collectives, are reduced by an op of their own. What is saved for backward then has the
  /// bits that the op saw (`x == amax(x)` finds its maximum), and is not reduced again.
  virtual void reduce_partials(const PrimRef& prim, Inputs in) const = 0;
  /// The effect on sharded destinations: each rank's pieces take the values of its part of the op.
  virtual void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) const = 0;
  /// The result of a creation (an op whose operands, keys, no loop runs over), of the shape that
  /// this payload places and placed like it, a sum that is still to be reduced excepted.
  virtual Tensor create(const PrimRef& prim, Inputs in) const = 0;
  /// `global`, placed as this payload says, with another piece.
  virtual Tensor with_local(const Meta& global, Tensor local) const = 0;
  /// The cotangent `g` as the operand `forward` wants it: Shard stays Shard, a sum to be reduced
  /// asks for the whole, Replicate takes what arrives. `forward` may be plain; so is then the
  /// result.
  virtual Tensor pin_cotangent(const Tensor& forward, Tensor g) const = 0;
  /// The values, where every rank has all of them; else throws ShardingError.
  virtual Tensor whole_value() const = 0;
};

/// Null unless `t` is sharded, itself or as what it stands for inside of function transforms. Null
/// too for a sample of vmap: its batch is placed, whose dims are others.
const ShardingLayer* placing(const Tensor& t);
/// Null unless `t` is sharded.
inline const ShardingLayer* sharding_of(const Tensor& t) {
  return static_cast<const ShardingLayer*>(shard_data(t));
}
/// The first that is sharded among `tensors`; null when none is.
const ShardingLayer* find_sharding(std::span<const Tensor> tensors);
/// The entry of layer_functions.
Tensors sharding_layer(const PrimRef& prim, Inputs in);
/// `t` as shape, dtype and placement alone.
Tensor without_values(const Tensor& t);

}  // namespace tessera
