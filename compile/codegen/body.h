// What a fused kernel computes, and nothing of how: scalar instructions over one nest of loops,
// with reductions over some of them. One form serves the interpreter, the C++ and the CUDA printer.
// Invariants (check): an instruction reads earlier ones only; it varies with exactly the loops that
// its operands vary with, less the reduced ones; what is stored has an address that is one for each
// element it varies with. Rounding is that of the ops it was made from: an instruction computes in
// the compute type of its dtype (f32 for 16-bit floats, i64 for narrow integers) and its result is
// rounded to its dtype, so fused pointwise ops give the bits of the ops one by one; only sums may
// be ordered differently, in an order fixed by the body; of two zeros a maximum or minimum may give
// either. (Softmax, an exp(x - amax(x)) that is only summed and divided by its sum, is computed as
// core's kernel for it does: exponentials within 1 ulp and 0 below 2^-126, times the reciprocal of
// the sum.)
#pragma once
#include <string>
#include <vector>

#include "core/ops/reduce_attributes.h"
#include "core/ops/scalar.h"

namespace tessera::compiler {

/// Set of loops, by bit; bit 0 is the outermost.
using LoopMask = uint32_t;
/// Index into Body::instrs.
using InstrId = int32_t;

enum class InstrKind : uint8_t {
  kLoad,       // element of an operand
  kConstant,   // `value`
  kIndex,      // i64: the index of loop `loop`
  kPointwise,  // functor `op` of core/ops/functors (or "where") of operands of one dtype
  kCast,       // the operand in another dtype, as core's cast converts
  kReduce,     // `reduce` of the operand over the loops of `reduced` (of equal values where it does
               // not vary), in the dtype that core's reductions give
};

struct Instr {
  InstrKind kind = InstrKind::kLoad;
  DType dtype = kF32;               // of the result
  SmallVector<InstrId, 3> in = {};  // kPointwise, kCast, kReduce
  LoopMask loops = 0;               // that the result varies with
  std::string op = {};              // kPointwise: the name of the op
  ReduceKind reduce = ReduceKind::kSum;
  LoopMask reduced = 0;  // kReduce
  int operand = 0;       // kLoad: into Body::operands
  int loop = 0;          // kIndex
  Scalar value = 0.0;    // kConstant
};

/// Where an operand or a result keeps its elements: `strides` in elements, one for each loop, 0
/// where it does not vary and never negative, from the first element of the tensor. A result may
/// vary where its value does not: it is repeated there.
struct Access {
  DType dtype = kF32;
  SmallVector<int64_t, 6> strides;
};

struct Store {
  InstrId value = 0;
  Access to;
};

struct Body {
  SmallVector<int64_t, 6> extents;  // of the loops, outermost first; at most kMaxDims, none is 0
  std::vector<Access> operands;
  std::vector<Instr> instrs;
  std::vector<Store> stores;  // in the order of the results
};

/// Throws BugError unless the invariants hold.
void check(const Body& body);
/// One line for each loop, operand, instruction and store; equal bodies have equal texts, and the
/// text is what kernels are cached by.
std::string to_string(const Body& body);

/// Runs the body with one core op for each instruction: slow, and the reference for generated code.
/// `in` and `out` are the memory of operands and results (any shape; only storage, offset and dtype
/// are read). Pointwise results have the bits of generated code; sums are those of core's `sum`.
void interpret_body(const Body& body, std::span<const Tensor> in, std::span<const Tensor> out);

}  // namespace tessera::compiler
