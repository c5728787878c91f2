// Reductions of the virtual NCCL. Invariant: 16-bit values are rounded at each step, and which rank
// is first depends on the place in the tensor, so whoever relies on one order of the terms or on
// one rounding is found out; all ranks get the same bits.
#pragma once
#include <vector>

#include "collectives/nccl/api.h"

namespace vgpu::nccl {

size_t size_of(tessera::nccl::DataType type);
/// What an operator does: with `scaled`, each term is multiplied by `scale` first.
struct Reduction {
  tessera::nccl::RedOp op = tessera::nccl::RedOp::kSum;
  bool scaled = false;
  double scale = 1;
};
/// Reduces `count` elements of all ranks, which are elements number `first` and on of `total`, into
/// `out`.
void reduce(const Reduction& how, tessera::nccl::DataType type, const std::vector<const char*>& in,
            char* out, size_t count, size_t first, size_t total);

}  // namespace vgpu::nccl
