// Turns a recorded graph into one that runs fast: runs the passes, generates code, makes the
// executor.
#pragma once
#include "compile/codegen/sized.h"
#include "compile/options.h"
#include "compile/passes/passes.h"
#include "compile/run/executor.h"
#include "core/base/function_ref.h"

namespace tessera::compiler {

/// Runs the passes over `graph`, the `number`th of its function, generates code for its fused ops
/// and plans memory. Where code cannot be had (no compiler, a cache that cannot be written), this
/// is logged once and the graph runs without fused ops. Where a pass throws, the graph runs as it
/// was recorded; this is logged, and `*unoptimised` says why. `instead` replaces the passes of
/// pipeline() unless it is empty. `ranks`: see ExecutorOptions. Throws UserError for a name in
/// options.skip that no pass has.
Executor build(Graph graph, const CompileOptions& options, int number = 1,
               std::string* unoptimised = nullptr, std::span<const Pass> instead = {},
               std::shared_ptr<StepRanks> ranks = nullptr);

/// Builds graphs that differ in one size: their kernels share code, which takes sizes at run time,
/// and their executors share an arena.
class SizedBuilder {
 public:
  explicit SizedBuilder(const CompileOptions& options, std::shared_ptr<StepRanks> ranks = nullptr)
      : options_(options), ranks_(std::move(ranks)) {}
  /// `probes` returns the same graph at other sizes. It is called when code has to be compiled, so
  /// that the code serves these sizes too. After kMaxCompilations runs of the compiler, graphs run
  /// without generated kernels. Otherwise this does what the function build() does and throws what
  /// it throws.
  Executor build(const Graph& graph, FunctionRef<std::vector<Graph>()> probes);
  int compilations() const { return kernels_.compilations() + device_compilations_; }

  static constexpr int kMaxCompilations = 3;

 private:
  bool add_code(Graph& graph, FunctionRef<std::vector<Graph>()> probes);

  CompileOptions options_;
  std::shared_ptr<StepRanks> ranks_;
  SizedKernels kernels_;
  int device_compilations_ = 0;
  std::shared_ptr<SharedArena> arena_ = make_shared_arena();
};

}  // namespace tessera::compiler
