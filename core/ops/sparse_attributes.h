// Attributes of segments and sparse products, as kernels read them.
#pragma once
#include "core/ops/reduce_attributes.h"

namespace tessera {

/// Operands data and offsets.
struct SegmentAttributes {
  int dim = 0;
  ReduceKind kind = ReduceKind::kSum;  // which op it is: kSum, kProd, kMax or kMin
  static void fields(auto& a, auto& f) { f.dim("dim", a.dim); }
};

/// Operands crow and col; results of the transposed matrix.
struct CsrTransposeAttributes {
  int64_t columns = 0;
  static void fields(auto& a, auto& f) { f("columns", a.columns); }
};

}  // namespace tessera
