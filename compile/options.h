// The options of compile().
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "compile/ir/pass.h"
#include "core/tensor/named_tensor.h"

namespace tessera::compiler {

/// What compiling is for. In every mode a device that captures runs a step as few launches.
enum class CompileMode : uint8_t {
  kDefault,         // ops become generated kernels
  kReduceOverhead,  // no code is generated, so that no compiler is needed
  kMaxAutotune,     // as kDefault; steps of a device also run beside each other on several streams
                    // where that was faster, which the first steps measure (ranks together); not in
                    // graphs that serve many sizes
};
/// Parses "default", "reduce-overhead" or "max-autotune"; throws UserError naming the text.
CompileMode parse_compile_mode(std::string_view text);

struct CompileOptions {
  std::string name = "step";            // in logs and reports
  std::vector<NamedTensor> names = {};  // of parameters and state, for readable graphs
  CompileMode mode = CompileMode::kDefault;
  // Passes to leave out, by name and separated by commas; TESSERA_COMPILE_SKIP adds to them.
  std::string skip = {};
  // The program's own passes. They run in this order on the graph as it was recorded, before those
  // of pipeline() (passes/passes.h).
  std::vector<Pass> passes = {};
  // Whether calls that differ in one size share one graph where the recorded graphs allow it
  // (record/dynamic_call.h), for all sizes between those recorded; otherwise each size has a graph
  // of its own. Set it to false for a function that treats some sizes in between in another way.
  bool dynamic = true;
  // Whether a shared graph serves sizes outside of the recorded range too, so that a function whose
  // lengths only grow (decoding with a cache) is replayed from its third call on. Set it only for a
  // function that treats all sizes alike: one that crops inputs longer than its window would be
  // replayed without cropping.
  bool beyond_recorded = false;
  // The most bytes that a run may take beside parameters and other state; 0: TESSERA_COMPILE_MEMORY
  // (megabytes) if it is set, else no limit. To keep to the limit, values of the forward pass are
  // computed again in backward, the cheapest for their size first, and no more of them than needed.
  // A graph that serves many sizes ignores the limit.
  size_t memory_limit = 0;
};

}  // namespace tessera::compiler
