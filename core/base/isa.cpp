#include "core/base/isa.h"

#include "core/base/env.h"
#include "core/base/error.h"

namespace tessera::cpu {
namespace {

bool supported(Isa isa) {
#if defined(__x86_64__) && defined(__clang__)  // whose names of the sets are newer than Clang 16
  const auto v3 = [] {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  };
  if (isa == Isa::kV4)
    return v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  if (isa == Isa::kV3) return v3();
#elif defined(__x86_64__)
  if (isa == Isa::kV4) return __builtin_cpu_supports("x86-64-v4");
  if (isa == Isa::kV3) return __builtin_cpu_supports("x86-64-v3");
#endif
  return isa == Isa::kBase;
}

// Whether this build has kernels for `isa`: TESSERA_KERNELS=native of CMake leaves out all others.
constexpr bool compiled([[maybe_unused]] Isa isa) {
#ifdef TESSERA_ONLY_ISA
  [[maybe_unused]] constexpr Isa base = Isa::kBase, v3 = Isa::kV3, v4 = Isa::kV4;
  return isa == TESSERA_ONLY_ISA;
#else
  return true;
#endif
}

}  // namespace

std::string_view isa_name(Isa isa) {
  return isa == Isa::kV4 ? "v4" : isa == Isa::kV3 ? "v3" : "base";
}

Isa current_isa() {
  static const Isa chosen = [] {
    std::string asked = env::get("TESSERA_ISA");
    for (Isa isa : {Isa::kV4, Isa::kV3, Isa::kBase}) {
      if (asked.empty() ? !supported(isa) || !compiled(isa) : asked != isa_name(isa)) continue;
      TESSERA_CHECK(supported(isa), "TESSERA_ISA={}: this CPU lacks that instruction set; unset it",
                    asked);
      TESSERA_CHECK(compiled(isa),
                    "TESSERA_ISA={}: this build has kernels for one other instruction set only; "
                    "unset it, or configure with -DTESSERA_KERNELS=all",
                    asked);
      return isa;
    }
    TESSERA_CHECK(!asked.empty(),
                  "this build has kernels for another CPU's instruction set only; configure it "
                  "with -DTESSERA_KERNELS=all, or build it on this machine");
    throw UserError(fmt::format("TESSERA_ISA={}: expected base, v3 or v4", asked));
  }();
  return chosen;
}

bool has_bf16_dot() {
#ifdef __x86_64__
  static const bool has = current_isa() == Isa::kV4 && __builtin_cpu_supports("avx512bf16");
  return has;
#else
  return false;
#endif
}

}  // namespace tessera::cpu
