// What compile() is told.
#pragma once
#include <string>
#include <vector>

#include "compile/ir/pass.h"
#include "core/tensor/named_tensor.h"

namespace tessera::compiler {

struct CompileOptions {
  std::string name = "step";            // in logs and reports
  std::vector<NamedTensor> names = {};  // of parameters and state, for readable graphs
  // Passes that are left out, by name and separated by commas; TESSERA_COMPILE_SKIP adds to them.
  std::string skip = {};
  // Passes of the program's own, run in this order before those of pipeline() (passes/passes.h), on
  // the graph as it was recorded.
  std::vector<Pass> passes = {};
  // Calls that differ in one size are one graph, between sizes that were recorded, where their
  // graphs say so (record/dynamic_call.h); else each size has a graph of its own. False: for
  // functions that treat some sizes between others in a way of their own.
  bool dynamic = true;
  // Sizes beyond those that were recorded are served too, so that a function whose lengths only
  // grow (decoding with a cache) is replayed from its third call on. For functions that treat all
  // sizes alike: one that crops what is longer than its window would not be run, and not crop.
  bool beyond_recorded = false;
  // Bytes that a run may take beside parameters and other state; 0: no limit. To keep to it, values
  // of the forward pass are computed again in backward, the cheapest for their size first, and no
  // more than has to be. TESSERA_COMPILE_MEMORY (megabytes) where this is 0. A graph of many sizes
  // keeps no limit.
  size_t memory_limit = 0;
};

}  // namespace tessera::compiler
