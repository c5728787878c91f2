// Attributes of segments and sparse products, as kernels read them.
#pragma once
#include "core/ops/attributes.h"
#include "core/ops/dim_attributes.h"

namespace tessera {

/// Operands data and offsets.
struct SegmentAttributes : DimAttributes {
  SegmentAttributes(OpId id, int dim, ReduceKind kind) : DimAttributes(id, dim), kind(kind) {}
  const ReduceKind kind;  // kSum, kProd, kMax or kMin
};

/// Operands crow and col; results of the transposed matrix.
struct CsrTransposeAttributes : Primitive {
  CsrTransposeAttributes(OpId id, int64_t columns) : Primitive(id), columns(columns) {}
  const int64_t columns;
};

}  // namespace tessera
