// The data of a sharded tensor: mesh, layout and this rank's piece. It implements ShardingLayer,
// whose virtual functions say how ops run on it.
#pragma once
#include "core/base/function_ref.h"
#include "core/dispatch/sharding.h"
#include "dtensor/mesh.h"

namespace tessera {

class ShardSpec final : public ShardingLayer {
 public:
  ShardSpec(DeviceMesh mesh, Layout layout, Tensor piece)
      : mesh(std::move(mesh)), layout(std::move(layout)) {
    local = std::move(piece);
  }
  static void* operator new(size_t bytes) { return pool_allocate(bytes); }
  static void operator delete(void* p, size_t bytes) { pool_deallocate(p, bytes); }

  std::string placement() const override;
  Tensors run(const PrimRef& prim, Inputs in) const override;
  void reduce_partials(const PrimRef& prim, Inputs in) const override;
  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) const override;
  Tensor create(const PrimRef& prim, Inputs in) const override;
  Tensor with_local(const Meta& global, Tensor local) const override;
  Tensor pin_cotangent(const Tensor& forward, Tensor g) const override;
  Tensor whole_value() const override;

  const DeviceMesh mesh;
  const Layout layout;

 private:
  bool assign_in_place(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) const;
};

/// Returns null unless `t` is sharded.
inline const ShardSpec* spec_of(const Tensor& t) {
  return static_cast<const ShardSpec*>(shard_data(t));
}

/// Does the same for the tensor that `t` stands for inside function transforms; null for a sample
/// of vmap.
inline const ShardSpec* placed_spec(const Tensor& t) {
  return static_cast<const ShardSpec*>(placing(t));
}
/// Applies f to the tensors that `in` stand for outside of all function transforms and returns the
/// result as a tensor of the current one. Nothing is recorded. Throws UserError in the name of `op`
/// for samples of vmap.
Tensor at_bottom(std::string_view op, Inputs in, FunctionRef<Tensor(Inputs)> f);

/// The layout that is Replicate along every axis.
inline Layout replicated(const DeviceMesh& mesh) {
  return Layout(size_t(mesh.ndim()), Replicate());
}
/// Makes a sharded tensor of `local`, this rank's piece, which must have the shape of its box.
Tensor wrap(const DeviceMesh& mesh, const Layout& layout, const Meta& global, Tensor local);
/// Returns `t` (sharded, or plain and the same on every rank) in another layout, unrecorded. Values
/// move between ranks; a tensor without values only changes its layout.
Tensor convert(const Tensor& t, const DeviceMesh& mesh, const Layout& to);
/// Returns only this rank's piece of convert()'s result. If `t` has no other owner, its piece is
/// moved out.
Tensor converted_piece(Tensor&& t, const DeviceMesh& mesh, const Layout& to);
/// The layout that a cotangent in layout `g` of an operand in layout `forward` must have.
Layout dual(const Layout& forward, Layout g, const Shape& global, const DeviceMesh& mesh);

/// True where ops may convert their operands by collectives: in backward, and in an
/// AllowCommunication scope.
bool may_communicate();

/// The identity on global values; only the sharding layer runs it. `grad`, if not empty, is the
/// layout in which it passes the cotangent on.
PrimRef redistribute_primitive(const DeviceMesh& mesh, const Layout& to, const Layout& grad);

/// A rule for an op whose parts on the ranks do not follow from axes. It fills the results and
/// returns true, or returns false to let the op be derived from its axes.
using Rule = bool (*)(const PrimRef& prim, Inputs in, const DeviceMesh& mesh, Tensors& out);
/// Returns null when the op has no rule.
Rule find_rule(OpId op);
/// The same for an update in place of many tensors at once.
using AssignRule = void (*)(std::span<const Tensor> dst, const PrimRef& prim, Inputs in,
                            const DeviceMesh& mesh);
AssignRule find_assign_rule(OpId op);

}  // namespace tessera
