#include "compile/passes/closed_set.h"

#include "core/primitive/primitive_of.h"

namespace tessera::compiler {

bool is_elementwise(const Primitive& prim) { return prim.traits().kind == OpKind::kPointwise; }
bool is_cheap(const Primitive& prim) { return is_elementwise(prim) && prim.traits().cost <= 1; }

const ReduceAttributes* as_reduction(const Primitive& prim) {
  const bool reduces = prim.traits().kind == OpKind::kReduce;
  return reduces ? &attributes_of<ReduceAttributes>(prim) : nullptr;
}

bool is_transparent_view(const Primitive& prim) { return prim.traits().shows_all; }

bool may_trap(const Primitive& prim, DType dtype) {
  return is_integral(dtype) && prim.traits().may_trap;
}

}  // namespace tessera::compiler
