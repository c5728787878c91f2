// The order of a body's loops, which unification leaves open.
#pragma once
#include "compile/codegen/body.h"

namespace tessera::compiler {

/// Puts loops in the order in which memory is laid out, results first, and makes one of neighbours
/// that every access and every instruction takes together.
void order_loops(Body& body);
/// True where the loops can be cut into rows and what is inside a row so that each reduction is
/// either finished within a row, which is then small enough to be swept again, or over all rows, at
/// the end, where only what varies with no row depends on it.
bool one_sweep(const Body& body);

}  // namespace tessera::compiler
