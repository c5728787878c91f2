// What a fused kernel computes, without saying how: scalar instructions over one nest of loops,
// with reductions over some of them. The interpreter and the printers of C++ and CUDA all work from
// this form. Invariants (check): an instruction reads only earlier ones; it varies with exactly the
// loops that its operands vary with, less the reduced ones; a stored value has one address for each
// element of the loops that it varies with. Rounding is that of the ops the body was made from: an
// instruction computes in the compute type of its dtype (f32 for 16-bit floats, i64 for narrow
// integers) and rounds its result to its dtype, so fused pointwise ops give the bits of the ops run
// one by one. Only sums may be taken in another order, one that the body fixes, and a maximum or
// minimum of 0 and -0 may be either of them. (Softmax, an exp(x - amax(x)) that is only summed and
// divided by its sum, is computed as core's softmax kernel does: exponentials within 1 ulp and 0
// below 2^-126, times the reciprocal of the sum.)
#pragma once
#include <string>
#include <vector>

#include "core/ops/reduce_attributes.h"
#include "core/ops/scalar.h"

namespace tessera::compiler {

/// A set of loops, one bit each; bit 0 is the outermost loop.
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

/// Where an operand or a result has its elements: `strides` from the first element of the tensor,
/// in elements, one for each loop. A stride is 0 where the access does not vary with the loop, and
/// never negative. A result may vary with a loop that its value does not vary with: the value is
/// repeated there.
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
/// Prints one line for each loop, operand, instruction and store. Equal bodies have equal texts,
/// and kernels are cached by this text.
std::string to_string(const Body& body);

/// Runs the body with one core op for each instruction. It is slow, and is the reference for
/// generated code. `in` and `out` are the memory of operands and results (of any shape; only
/// storage, offset and dtype are read). Pointwise results have the bits of generated code; sums are
/// those of core's `sum`.
void interpret_body(const Body& body, std::span<const Tensor> in, std::span<const Tensor> out);

}  // namespace tessera::compiler
