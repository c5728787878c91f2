// The instruction set that kernels run with. Invariant: it is chosen once, before the first kernel.
#pragma once
#include <string_view>

namespace tessera::cpu {

/// kBase is what the compiler assumes of any CPU; kV3 is x86-64-v3 (AVX2, FMA), kV4 x86-64-v4
/// (AVX-512 F, BW, CD, DQ, VL).
enum class Isa { kBase, kV3, kV4 };

/// The set in use: the best this CPU has, or TESSERA_ISA. Throws UserError when the CPU lacks it,
/// or this build has no kernels for it (TESSERA_KERNELS=native of CMake, on another machine).
Isa current_isa();
/// Whether the CPU has instructions for products of bf16 with f32 sums (AVX512-BF16) and kV4 is the
/// set in use. The CPU, and so oneDNN, then reads denormal operands as zeros.
bool has_bf16_dot();
std::string_view isa_name(Isa isa);

}  // namespace tessera::cpu
