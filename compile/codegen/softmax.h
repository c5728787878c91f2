// Recognises a softmax, exp(x - max(x)) along a row, in a schedule. Its exponentials are at most 1
// and one of them is 1, which allows generated code that would be wrong for other exponentials.
#pragma once
#include "compile/codegen/schedule.h"

namespace tessera::compiler {

/// True for a float32 exponential below its maximum that is only summed (over elements that include
/// the maximum) and divided by such sums, or multiplied by their reciprocals. Below 2^-126 it may
/// be 0, as in core's softmax. Any other reader needs the bits of exp.
bool is_softmax_exp(const Schedule& s, InstrId id);
/// True for a row's sum of exp(x - amax(x)). It is at least 1, so division by it may be replaced by
/// multiplication with its reciprocal.
bool is_softmax_sum(const Schedule& s, InstrId id);
/// Whether `max`, a maximum over a row, may ignore NaN. It may if every result that would be NaN
/// through the maximum is NaN through the sum of the row's exponentials, which is NaN where an
/// element is.
bool may_pass_over_nan(const Schedule& s, InstrId max);
/// Returns the pieces of rows if nests that run beside each other are a softmax over long rows
/// whose exponentials are only summed and divided by their sum. With m_k and s_k the maximum and
/// the sum of piece k and m the maximum of the row, the sum is sum_k s_k exp(m_k - m), and element
/// x of piece k becomes exp(x - m_k) times exp(m_k - m) / sum. Elements are thus read from memory
/// once and stay in the first-level cache until they are exponentials (Milakov and Gimelshein,
/// 2018).
Pieces softmax_pieces(const Schedule& s);

}  // namespace tessera::compiler
