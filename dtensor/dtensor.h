// Sharded tensors. A tensor with a layout over a mesh is an ordinary Tensor: it has the global
// shape, every op runs on it, autograd differentiates it; what each rank computes follows from the
// op's axis map. Forward never communicates unasked: an op that would have to throws ShardingError
// naming the redistribute() that helps, unless a scope AllowCommunication permits it. Backward
// reduces cotangents where a forward layout requires it and nowhere else.
//
// A reshape keeps cuts of a dim that becomes one dim or the outermost of several. Adjacent dims of
// extent 1 are matched in order (squeeze and unsqueeze are reshapes too); a reshape that removes
// one which is cut is refused. Function transforms see placements as they are outside, and place
// gradients as backward does without them. Under vmap only the batch has a placement, so functions
// that change or read placements refuse a sample; a gradient with respect to a sharded tensor from
// outside is refused if it is taken inside of vmap and depends on the sample. Under exact
// contraction (core/ops/contract.h) a product never passes partial sums of an operand on to its
// result, and cut rows are made whole before the global norm, or a loss over cut classes, reads
// them.
#pragma once
#include "core/dispatch/scoped.h"
#include "dtensor/mesh.h"

namespace tessera {

enum class Communication : uint8_t;  // core/dispatch/context.h

/// `full`, the same values on every rank of the mesh, cut as `layout` says; each rank keeps a copy
/// of its piece. No communication. The gradient of `full` is whole again.
Tensor distribute(const Tensor& full, const DeviceMesh& mesh, const Layout& layout);
/// Returns the same values in another layout, moving the fewest bytes. `grad`, if given, is the
/// layout in which the cotangent is passed on. Otherwise this is the dual of t's layout: Shard for
/// Shard, Replicate for Partial and, for Replicate, the layout in which the cotangent arrives (a
/// sum over ranks stays unreduced). At the entry of a tensor-parallel region, `grad` should be
/// Replicate.
Tensor redistribute(const Tensor& t, const Layout& to, const Layout& grad = {});
/// Does the same for one axis.
Tensor redistribute(const Tensor& t, std::string_view axis, const Placement& to);

/// Makes the sharded tensor of which each rank holds `local`. `global` is its shape; if it is
/// empty, shards must be even, and ranks compare the shapes of what they hold (a small collective;
/// none where nothing is sharded, or in a trace). Throws ShardingError unless `local` has the shape
/// of this rank's piece (if `global` is empty, on every rank), and where Partials do not commute (a
/// sum and a maximum). The gradient of `local` is its piece of the whole gradient.
Tensor from_local(const Tensor& local, const DeviceMesh& mesh, const Layout& layout,
                  const Shape& global = {});
/// Returns this rank's piece, a plain tensor that shares memory. `grad` is the layout that the
/// ranks' gradients of their pieces form together; empty: the dual of t's layout. Use Partial where
/// ranks go on with different data after a Replicate.
Tensor to_local(const Tensor& t, const Layout& grad = {});
/// Returns all values as a plain tensor on every rank. A plain tensor is returned unchanged.
Tensor full_tensor(const Tensor& t);

/// These throw UserError for a plain tensor.
const DeviceMesh& mesh_of(const Tensor& t);
const Layout& layout_of(const Tensor& t);
/// The range of each dim that this rank holds; all of each for a plain tensor.
Box box_of(const Tensor& t);

/// A scope in which ops may convert their operands by collectives; each kind is logged once.
class AllowCommunication {
 public:
  AllowCommunication();

 private:
  Scoped<Communication> on_;
};
/// A scope in which losses over a vocabulary that is cut over ranks may sum a few numbers of each
/// row over these ranks; other ops stay strict. The loss is the same on every rank of the axes that
/// cut the vocabulary.
class LossParallel {
 public:
  LossParallel();

 private:
  Scoped<Communication> on_;
  Scoped<bool> same_targets_;
};
/// A scope in which plain tensors that meet sharded ones are taken to be the same on every rank.
class ReplicatePlain {
 public:
  ReplicatePlain();

 private:
  Scoped<bool> on_;
};

}  // namespace tessera
