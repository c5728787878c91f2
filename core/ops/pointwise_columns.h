// The words of two columns of pointwise.def: which operands an op takes, and other facts about it.
#pragma once

namespace tessera::columns {

enum Kind {
  kFloat,  // floats: integers become the default float dtype first
  kAny,    // any dtype
  kBits,   // integers and bool
  kTest,   // any dtype, and the result is bool
};

enum Fact : unsigned {
  kNoBool = 1,     // the public function refuses operands that are all bool
  kMayTrap = 2,    // on integers the kernel may throw (division by zero)
  kKeepsNan = 4,   // a NaN in any operand gives NaN; leaving it out is safe
  kPlain = 8,      // arithmetic: names of fused kernels leave it out
  kInGroups = 16,  // looks up in tables: loops over floats take it in groups (functors/group.h)
  kLinear = 32,    // linear in all operands together: a sum of partial results is a partial result
  kLinearInX = 64,
  kLinearInY = 128,
};

}  // namespace tessera::columns
