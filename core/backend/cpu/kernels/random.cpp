// Philox words and Box-Muller normals in loops that vectorise: the block number is the lane.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/tables.h"
#include "core/tensor/philox.h"
// Each text needs the one before it.
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/math.h"
#include "core/ops/functors/math_trig.h"
// clang-format on

namespace tessera::cpu {
namespace {

void words(uint64_t key, uint64_t counter_hi, uint64_t first, int64_t blocks, uint32_t* out) {
#pragma GCC ivdep
  for (int64_t b = 0; b < blocks; ++b) {
    Philox4 p = philox4x32(key, counter_hi, first + uint64_t(b));
    out[4 * b] = p.v[0], out[4 * b + 1] = p.v[1], out[4 * b + 2] = p.v[2], out[4 * b + 3] = p.v[3];
  }
}

// Box, Muller 1958: r = sqrt(-2 log u), then r cos and r sin of a uniform angle. u in (0, 1].
void normals(const uint32_t* w, float* out, int64_t pairs) {
#pragma GCC ivdep
  for (int64_t i = 0; i < pairs; ++i) {
    float u = (float(w[2 * i] >> 8) + 1.0f) * 0x1p-24f,
          angle = float(w[2 * i + 1] >> 8) * (0x1p-24f * 6.283185307f);
    float r = fn::sqrt(-2.0f * fn::log(u));
    out[2 * i] = r * fn::cos(angle), out[2 * i + 1] = r * fn::sin(angle);
  }
}

}  // namespace

template <>
const RandomTable& isa_table<RandomTable, isa::TESSERA_ISA>() {
  static const RandomTable table{words, normals};
  return table;
}

}  // namespace tessera::cpu
