#include "collectives/reduction.h"

#include "collectives/kernels/trees.h"
#include "core/base/boundary.h"
#include "core/base/isa.h"

namespace tessera::detail {
namespace {

const TreeTable& trees() {
  static const TreeTable& table = []() -> const TreeTable& {
    [[maybe_unused]] const cpu::Isa set = cpu::current_isa();
#ifdef TESSERA_ONLY_ISA
    return tree_table<isa::TESSERA_ONLY_ISA>();
#else
#ifdef __x86_64__
    if (set == cpu::Isa::kV4) return tree_table<isa::v4>();
    if (set == cpu::Isa::kV3) return tree_table<isa::v3>();
#endif
    return tree_table<isa::base>();
#endif
  }();
  return table;
}

/// The operator on bools of 0 and 1: a sum becomes "any", a product "all".
ReduceOp of_bool(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr: return ReduceOp::kBitOr;
    case ReduceOp::kBitXor: return ReduceOp::kBitXor;
    default: return ReduceOp::kBitAnd;
  }
}

}  // namespace

bool reducible(ReduceOp op, DType dtype) {
  if (is_storage_only(dtype)) return false;
  if (op == ReduceOp::kAvg) return is_floating(dtype);
  return op < ReduceOp::kBitAnd || is_integral(dtype);
}

void reduce_tree(ReduceOp op, DType dtype, void* dst, std::span<const void* const> sources,
                 int64_t count, int terms) {
  reduce_tree(op, dtype, std::span<void* const>(&dst, 1), sources, count, terms);
}

void reduce_tree(ReduceOp op, DType dtype, std::span<void* const> to,
                 std::span<const void* const> sources, int64_t count, int terms) {
  TESSERA_ASSERT(reducible(op, dtype) && !sources.empty() && !to.empty(), "{} of {}", name_of(op),
                 name_of(dtype));
  static_assert(kNumReduceOps == 8 && int(DType::kU8) == 1 && std::size(kComputedDTypes) == 8);
  const bool is_bool = dtype == DType::kBool;
  int row = int(is_bool ? of_bool(op) : op), column = is_bool ? 0 : int(dtype) - 1;
  meet("trees.block", count);
  trees().kernels[row][column](to.data(), int(to.size()), sources.data(), int(sources.size()),
                               count, terms ? terms : int(sources.size()));
}

}  // namespace tessera::detail
