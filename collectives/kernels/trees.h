// The loops of reductions, compiled once for each instruction set; collectives/reduction.cpp
// chooses. Invariant: all of them give the same bits, since each loop is one correctly rounded
// operation for each element.
#pragma once
#include <cstdint>

namespace tessera::detail {

namespace isa {
struct base;  // what the compiler assumes of any CPU
struct v3;    // x86-64-v3: AVX2, FMA
struct v4;    // x86-64-v4: AVX-512 F, BW, CD, DQ, VL
}  // namespace isa

/// Sets to[k][i] to the balanced tree over element i of all sources, for each of n_to places k and
/// i in [0, count). A place may be one of the sources. An average is divided by `terms`.
using TreeKernel = void (*)(void* const* to, int n_to, const void* const* sources, int n_sources,
                            int64_t count, int terms);

// Rows are in the order of ReduceOp, columns in that of DType from u8 on (bool is a u8 of 0 and 1);
// an entry is null where the operator is not defined.
struct TreeTable {
  TreeKernel kernels[8][7];
};
template <class I>
const TreeTable& tree_table();

}  // namespace tessera::detail
