// Chooses the order of a body's loops, which unifying the loops of several ops leaves open.
#pragma once
#include "compile/codegen/body.h"

namespace tessera::compiler {

/// Puts the loops in the order in which memory is laid out, results first, and merges neighbours
/// that every access and every instruction treats as one.
void order_loops(Body& body);
/// True where the loops can be divided into rows and loops inside of rows so that each reduction is
/// either finished within a row, which must then be small enough to be swept again, or runs over
/// all rows, in which case only values that do not vary with the row depend on it.
bool one_sweep(const Body& body);

}  // namespace tessera::compiler
