// What is known of the exponentials of a softmax, exp(x - max(x)) along a row, which allows text
// that would be wrong elsewhere.
#pragma once
#include "compile/codegen/schedule.h"

namespace tessera::compiler {

/// An exponential of float32 below its maximum that is only summed, with the maximum among what is,
/// and divided by such sums, or times their reciprocals. Below 2^-126 it may be 0, as that of
/// core's softmax is. Anything else that reads it wants the bits of exp.
bool is_softmax_exp(const Schedule& s, InstrId id);
/// A row's sum of exp(x - amax(x)), which is at least 1: dividing by it is multiplying by its
/// reciprocal.
bool is_softmax_sum(const Schedule& s, InstrId id);
/// Whether `max`, a maximum over a row, may pass over NaN: the sum of the row's exponentials is NaN
/// where an element is, and so is, through it, all that would have been through the maximum.
bool may_pass_over_nan(const Schedule& s, InstrId max);
/// Pieces of rows, if nests beside each other are a softmax whose exponentials are only added up
/// and divided by their sum, and rows are long. With m_k, s_k the maximum and the sum of piece k
/// and m the maximum of the row, the sum is sum_k s_k exp(m_k - m), and element x of piece k
/// becomes exp(x - m_k) times exp(m_k - m) / sum: elements are read from memory, and the first
/// cache has them until they are exponentials (Milakov and Gimelshein, 2018).
Pieces softmax_pieces(const Schedule& s);

}  // namespace tessera::compiler
