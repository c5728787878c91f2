// Attributes of factorisations and triangular systems, as kernels read them.
#pragma once
#include "core/primitive/primitive.h"

namespace tessera {

/// Operands a [.., N, N], of which one triangle is read, and b; the result x has the shape of b.
struct SolveTriangularAttributes : Primitive {
  SolveTriangularAttributes(const OpInfo& op, bool upper, bool left, bool unitriangular)
      : Primitive(op), upper(upper), left(left), unitriangular(unitriangular) {}
  const bool upper;          // the upper triangle of a, otherwise the lower
  const bool left;           // a x = b, otherwise x a = b
  const bool unitriangular;  // the diagonal is not read and counts as ones
};

}  // namespace tessera
