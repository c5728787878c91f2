// Products together with what is made of their operands and results while these are at hand. The
// compiler makes these ops (compile/passes/join_bias.cpp, join_epilogues.cpp) of the ops that they
// stand for, on devices whose products do the rest for nothing. Elsewhere they are those ops.
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

// The ops below have no gradients: they are made behind autograd.

/// Operands a, b and bias [N]; results gelu_tanh(x) and x = contract(spec, a, b) + bias. Throws
/// UserError unless may_join_gelu().
PrimRef contract_gelu_op(const ContractAttributes& attributes);
/// Operands a, b and x, of the layout of the product; results g = gelu_tanh'(x) contract(spec, a,
/// b), and the sum of g over all dims but the last, which are kept. Throws UserError unless
/// may_join_gelu().
PrimRef contract_gelu_grad_op(const ContractAttributes& attributes);
/// Whether may_add_bias(), and the product is one of matrices: its result has two dims or more, and
/// no letter is in all three words.
bool may_join_gelu(const ContractAttributes& attributes);

/// `of_b` says which operand is summed.
struct ContractSumsAttributes : ContractAttributes {
  bool of_b = false;
  static void fields(auto& a, auto& f) { ContractAttributes::fields(a, f), f("of_b", a.of_b); }
  /// The word of the operand that is summed.
  const std::string& summed() const { return of_b ? b : a; }
};
/// Operands a and b; results contract(spec, a, b), and the sum of one operand over the letters that
/// the product sums, which are kept. Throws UserError unless may_sum_operand().
PrimRef contract_sums_op(const ContractSumsAttributes& attributes);
/// Whether sums are in no fixed order, and the operand has one letter beside those that are summed.
bool may_sum_operand(const ContractSumsAttributes& attributes);

/// Operands a and b; contract(spec, a, b) in f32 where they have 16 bits.
PrimRef contract_wide_op(const ContractAttributes& attributes);
/// Operands a, b and c, of the shape of the product and its dtype, or in f32 where a and b have 16
/// bits: contract(spec, a, b) + c in the dtype of c, in whose memory it may lie.
PrimRef contract_add_op(const ContractAttributes& attributes);
/// Whether sums are in no fixed order; what contract_wide and contract_add ask for.
bool may_be_wide(const ContractAttributes& attributes);

void register_contract_epilogue_ops(OpRegistry& registry);

}  // namespace tessera
