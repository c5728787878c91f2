// A product and a bias in one op, which the compiler makes of a contraction and an addition
// (compile/passes/join_bias.cpp) for devices whose products add a bias for nothing. Elsewhere it is
// the two ops that it stands for.
#pragma once
#include "core/ops/contract_attributes.h"
#include "core/primitive/registry.h"

namespace tessera {

/// The op of contract(spec, a, b).
PrimRef contract_op(const ContractAttributes& attributes);
/// Operands a, b and bias [N]: contract(spec, a, b) + bias, where N is the extent of the result's
/// last dim. Throws UserError unless may_add_bias().
PrimRef contract_bias_op(const ContractAttributes& attributes);
/// Whether sums are in no fixed order (`leaves` is 0), and b has the letter of the result's last
/// dim and a has not.
bool may_add_bias(const ContractAttributes& attributes);

void register_contract_bias_ops(OpRegistry& registry);

}  // namespace tessera
