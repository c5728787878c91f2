// What a sharded tensor carries: the mesh, the layout and this rank's piece; and, behind the
// virtual methods of ShardingLayer, how ops run on it.
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

/// Null unless `t` is sharded.
inline const ShardSpec* spec_of(const Tensor& t) {
  return static_cast<const ShardSpec*>(shard_data(t));
}

/// As spec_of, of what `t` stands for inside of function transforms; null for a sample of vmap.
inline const ShardSpec* placed_spec(const Tensor& t) {
  return static_cast<const ShardSpec*>(placing(t));
}
/// f of what `in` stands for outside of all function transforms, as a tensor of the current one.
/// Nothing is recorded. Throws UserError, in the name of `op`, for samples of vmap.
Tensor at_bottom(std::string_view op, Inputs in, FunctionRef<Tensor(Inputs)> f);

/// Replicate along every axis.
inline Layout replicated(const DeviceMesh& mesh) {
  return Layout(size_t(mesh.ndim()), Replicate());
}
/// A sharded tensor over `local`, this rank's piece, whose shape is that of its box.
Tensor wrap(const DeviceMesh& mesh, const Layout& layout, const Meta& global, Tensor local);
/// `t` (sharded, or plain and then held by every rank) in another layout, unrecorded. Values move;
/// a tensor that has none changes its words.
Tensor convert(const Tensor& t, const DeviceMesh& mesh, const Layout& to);
/// As convert, this rank's piece alone. When nobody else owns `t`, its piece is moved out.
Tensor converted_piece(Tensor&& t, const DeviceMesh& mesh, const Layout& to);
/// Layout of the cotangent `g` that the operand `forward` asks for.
Layout dual(const Layout& forward, Layout g, const Shape& global, const DeviceMesh& mesh);

/// True where ops may convert their operands by collectives: in backward, and under
/// AllowCommunication.
bool may_communicate();

/// The identity on global values: only the sharding layer runs it. `grad`, where not empty, is the
/// layout of the cotangent it passes on.
PrimRef redistribute_primitive(const DeviceMesh& mesh, const Layout& to, const Layout& grad);

/// An op whose parts on the ranks axes cannot express. Fills the results and returns true, or
/// returns false: then the op is derived from its axes after all.
using Rule = bool (*)(const PrimRef& prim, Inputs in, const DeviceMesh& mesh, Tensors& out);
/// Null when there is none for the op.
Rule find_rule(OpId op);
/// The same for the effect: updates of many tensors at once.
using AssignRule = void (*)(std::span<const Tensor> dst, const PrimRef& prim, Inputs in,
                            const DeviceMesh& mesh);
AssignRule find_assign_rule(OpId op);

}  // namespace tessera
