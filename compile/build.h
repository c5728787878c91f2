// From a recorded graph to one that runs fast: passes, code, executor.
#pragma once
#include "compile/codegen/sized.h"
#include "compile/options.h"
#include "compile/passes/passes.h"
#include "compile/run/executor.h"
#include "core/base/function_ref.h"

namespace tessera::compiler {

/// Passes over `graph`, the `number`th of its function, code for its fused ops, and memory. Where
/// code cannot be had (no compiler, a cache that cannot be written), that is said once and the
/// graph runs without fused ops. Where a pass throws, the graph runs as it was recorded; that is
/// logged, and `*unoptimised` says why. `instead`: of pipeline(), unless empty. Throws UserError
/// for a name in options.skip that no pass has.
Executor build(Graph graph, const CompileOptions& options, int number = 1,
               std::string* unoptimised = nullptr, std::span<const Pass> instead = {});

/// Builds graphs that differ in one size: their kernels share code, which takes sizes at run time,
/// and their executors share an arena.
class SizedBuilder {
 public:
  explicit SizedBuilder(const CompileOptions& options) : options_(options) {}
  /// `probes`: the same graph at other sizes, asked for when code has to be compiled, so that it
  /// serves these too. After kMaxCompilations runs of the compiler graphs run without generated
  /// kernels. Otherwise as build(), with its errors.
  Executor build(const Graph& graph, FunctionRef<std::vector<Graph>()> probes);
  int compilations() const { return kernels_.compilations(); }

  static constexpr int kMaxCompilations = 3;

 private:
  bool add_code(Graph& graph, FunctionRef<std::vector<Graph>()> probes);

  CompileOptions options_;
  SizedKernels kernels_;
  std::shared_ptr<SharedArena> arena_ = make_shared_arena();
};

}  // namespace tessera::compiler
