// Sharded tensors. A tensor with a layout over a mesh is an ordinary Tensor: it has the global
// shape, every op runs on it, autograd differentiates it; what each rank computes follows from the
// op's axis map. Forward never communicates by surprise: an op that would have to throws
// ShardingError naming the redistribute() that helps, unless a scope AllowCommunication says
// otherwise. Backward reduces cotangents where a forward layout asks for it and nowhere else.
#pragma once
#include "core/dispatch/scoped.h"
#include "dtensor/mesh.h"

namespace tessera {

enum class Communication : uint8_t;  // core/dispatch/context.h

/// `full`, the same values on every rank of the mesh, cut as `layout` says; each rank keeps a copy
/// of its piece. No communication. The gradient of `full` is whole again.
Tensor distribute(const Tensor& full, const DeviceMesh& mesh, const Layout& layout);
/// Another layout of the same values, by the fewest bytes. `grad`, where given, is the layout in
/// which the cotangent is passed on; else it is the dual of t's layout: Shard for Shard, Replicate
/// for Partial, and for Replicate whatever arrives (a sum over ranks stays unreduced). The entry of
/// a tensor-parallel region asks for Replicate there.
Tensor redistribute(const Tensor& t, const Layout& to, const Layout& grad = {});
/// The same with one axis changed.
Tensor redistribute(const Tensor& t, std::string_view axis, const Placement& to);

/// The sharded tensor of which each rank holds `local`. `global` is its shape; empty: that of even
/// shards, for which ranks compare the shapes of what they hold (a small collective; none where
/// nothing is sharded, or in a trace). Throws ShardingError, then on every rank, unless `local` has
/// the shape of this rank's piece, and where Partials do not commute (a sum and a maximum). The
/// gradient of `local` is the piece of the whole gradient.
Tensor from_local(const Tensor& local, const DeviceMesh& mesh, const Layout& layout,
                  const Shape& global = {});
/// This rank's piece, a plain tensor that shares memory. `grad` is the layout that the ranks'
/// gradients of their pieces form together; empty: the dual of t's layout. Ranks that go on with
/// different data after a Replicate say Partial here.
Tensor to_local(const Tensor& t, const Layout& grad = {});
/// All values, a plain tensor on every rank. A plain tensor passes.
Tensor full_tensor(const Tensor& t);

/// Throw UserError for a plain tensor.
const DeviceMesh& mesh_of(const Tensor& t);
const Layout& layout_of(const Tensor& t);
/// What this rank holds of each dim; all of them for a plain tensor.
Box box_of(const Tensor& t);

/// Ops in this scope convert their operands by collectives where they must, logging each kind once.
class AllowCommunication {
 public:
  AllowCommunication();

 private:
  Scoped<Communication> on_;
};
/// Losses over a vocabulary that is spread over ranks sum a few numbers of each row over them;
/// other ops stay strict. The loss is the same on every rank of the axes that cut the vocabulary.
class LossParallel {
 public:
  LossParallel();

 private:
  Scoped<Communication> on_;
  Scoped<bool> same_targets_;
};
/// Plain tensors in this scope are taken to be the same on every rank when they meet sharded ones.
class ReplicatePlain {
 public:
  ReplicatePlain();

 private:
  Scoped<bool> on_;
};

}  // namespace tessera
