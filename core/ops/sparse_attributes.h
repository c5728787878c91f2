// Attributes of segments and sparse products, as kernels read them.
#pragma once
#include "core/ops/attributes.h"
#include "core/ops/dim_attributes.h"

namespace tessera {

/// Operands data and offsets.
struct SegmentAttributes : DimAttributes {
  SegmentAttributes(const OpInfo& op, int dim, ReduceKind kind)
      : DimAttributes(op, dim), kind(kind) {}
  const ReduceKind kind;  // kSum, kProd, kMax or kMin
};

/// Operands crow and col; results of the transposed matrix.
struct CsrTransposeAttributes : Primitive {
  CsrTransposeAttributes(const OpInfo& op, int64_t columns) : Primitive(op), columns(columns) {}
  const int64_t columns;
};

}  // namespace tessera
