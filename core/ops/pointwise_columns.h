// The words in two columns of pointwise.def: what operands an op has, and what else holds of it.
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
  kMayTrap = 2,    // integers may have no result (division by zero): the kernel throws
  kKeepsNan = 4,   // a NaN in any operand gives NaN; need not be stated
  kPlain = 8,      // arithmetic, which a fused kernel is not named after
  kInGroups = 16,  // looks up in tables: loops over floats take it in groups (functors/group.h)
  kLinear = 32,    // linear in all operands together: a sum of partial results is a partial result
  kLinearInX = 64,
  kLinearInY = 128,
};

}  // namespace tessera::columns
