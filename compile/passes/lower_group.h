// Lowers a group of nodes to a fused kernel: unifies their loops, determines what is read from
// memory, and writes the body. Invariant: distinct loops of one node stay distinct, and some node
// runs over all loops of the group, so that the body is one sweep.
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
  ValueIds into;  // the places results are written to; kNoValue: new memory
};

/// Returns the kernel of `nodes` (fusible, in order), or null where they do not make one: their
/// loops do not fit each other, memory is written and read in different layouts, there are more
/// than kMaxDims loops, or generated code supports no order of them.
std::optional<LoweredGroup> lower_group(const Dataflow& flow, std::span<const int32_t> nodes);

}  // namespace tessera::compiler
