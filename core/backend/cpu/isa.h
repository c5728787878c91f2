// Instruction sets. Files under kernels/ are compiled once per set and hold nothing but loops over
// raw pointers; each fills a table of function pointers, and simd<Table>() is the table of the set
// chosen at start. Invariant: kernels/ files include no library header with inline functions, so
// code for one set cannot leak into another's callers.
#pragma once
#include "core/backend/cpu/kernels/tables.h"
#include "core/base/isa.h"

namespace tessera::cpu {

namespace isa {
struct base;  // what the compiler assumes of any CPU
struct v3;    // x86-64-v3: AVX2, FMA
struct v4;    // x86-64-v4: AVX-512 F, BW, CD, DQ, VL
}  // namespace isa

/// Defined by each family of kernels, once per instruction set.
template <class Table, class I>
const Table& isa_table();

template <class Table>
const Table& simd() {
  static const Table& table = [&]() -> const Table& {
    [[maybe_unused]] const Isa set = current_isa();
#ifdef TESSERA_ONLY_ISA
    return isa_table<Table, isa::TESSERA_ONLY_ISA>();
#else
#ifdef __x86_64__
    if (set == Isa::kV4) return isa_table<Table, isa::v4>();
    if (set == Isa::kV3) return isa_table<Table, isa::v3>();
#endif
    return isa_table<Table, isa::base>();
#endif
  }();
  return table;
}

}  // namespace tessera::cpu
