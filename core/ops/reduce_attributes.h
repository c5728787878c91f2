// Attributes of reductions, as kernels read them.
#pragma once
#include "core/primitive/attributes.h"

namespace tessera {

enum class ReduceKind : uint8_t { kSum, kProd, kMax, kMin, kAny, kAll };
/// The name of the op of a kind: "amax".
std::string_view name_of(ReduceKind kind);

/// Reduces the dims whose bit is set in `mask`.
struct ReduceAttributes {
  ReduceKind kind = ReduceKind::kSum;  // which op it is
  uint32_t mask = 0;
  bool keepdim = false;
  static void fields(auto& a, auto& f) { f.dim("mask", a.mask), f("keepdim", a.keepdim); }
};

}  // namespace tessera
