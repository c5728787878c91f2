// A group of nodes on its way to a fused kernel: their loops made one, what is read from memory,
// and the body. Invariant: distinct loops of one node stay distinct, and some node runs over all
// loops of the group, so that the body is one sweep.
#pragma once
#include <optional>
#include <vector>

#include "compile/codegen/body.h"
#include "compile/passes/dataflow.h"
#include "compile/passes/loops.h"

namespace tessera::compiler {

struct LoweredGroup {
  Body body;
  ValueIds in;    // operands, in the body's order
  ValueIds out;   // results, likewise
  ValueIds into;  // their places; kNoValue: memory of their own
};

/// The kernel of `nodes` (fusible, in order), or null where they do not make one: loops that do not
/// fit each other, memory that is written and read in different layouts, more than kMaxDims loops,
/// or an order that generated code does not support.
std::optional<LoweredGroup> lower_group(const Dataflow& flow, std::span<const int32_t> nodes);

}  // namespace tessera::compiler
