// Attributes of factorisations and triangular systems, as kernels read them.
#pragma once
#include "core/primitive/attributes.h"

namespace tessera {

/// Operands a [.., N, N], of which one triangle is read, and b; the result x has the shape of b.
struct SolveTriangularAttributes {
  bool upper = false;          // the upper triangle of a, otherwise the lower
  bool left = true;            // a x = b, otherwise x a = b
  bool unitriangular = false;  // the diagonal is not read and counts as ones
  static void fields(auto& a, auto& f) {
    f("upper", a.upper), f("left", a.left), f("unitriangular", a.unitriangular);
  }
};

}  // namespace tessera
