#include "compile/build.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "compile/codegen/generate.h"
#include "compile/passes/passes.h"
#include "core/base/env.h"
#include "core/base/log.h"

namespace tessera::compiler {
namespace {

std::string passes_to_skip(const CompileOptions& options) {
  std::string more = env::get("TESSERA_COMPILE_SKIP");
  return options.skip + (options.skip.empty() || more.empty() ? "" : ",") + more;
}

std::vector<const Fused*> fused_ops(const Graph& graph) {
  std::vector<const Fused*> kernels;
  for (const Node& n : graph.nodes)
    if (const Fused* fused = as_fused(*n.prim)) kernels.push_back(fused);
  return kernels;
}

void set_code(Graph& graph, std::span<const Ref<const LoadedKernel>> code) {
  size_t k = 0;
  for (Node& n : graph.nodes)
    if (const Fused* f = as_fused(*n.prim))
      n.prim = PrimRef(new Fused(f->name, f->body, f->results, code[k++]));
}

// Gives the fused ops of `graph` code.
void add_code(Graph& graph) {
  std::vector<const Fused*> kernels = fused_ops(graph);
  if (!kernels.empty()) set_code(graph, generate(kernels, {}));
}

// Where TESSERA_COMPILE_DUMP says: "step.2.recorded.4711.txt" is the second graph of process 4711.
void dump(const Graph& graph, const CompileOptions& options, int number, const char* stage) {
  std::string folder = env::get("TESSERA_COMPILE_DUMP");
  if (folder.empty()) return;
  std::filesystem::create_directories(folder);
  std::ofstream file(
      fmt::format("{}/{}.{}.{}.{}.txt", folder, options.name, number, stage, getpid()));
  file << to_string(graph);
  if (!file.flush()) log::warn("compile: TESSERA_COMPILE_DUMP: cannot write to {}", folder);
}

}  // namespace

Executor build(Graph graph, const CompileOptions& options, int number, std::string* unoptimised,
               std::span<const Pass> passes) {
  std::string skip = passes_to_skip(options);
  check_passes(skip);
  dump(graph, options, number, "recorded");
  Graph fused = graph;
  try {
    run_passes(fused, skip, passes);
  } catch (const std::exception& e) {
    // Slower is better than not at all; the text says which pass, so it can be left out or mended.
    log::warn(
        "compile: {}; {} runs its graph as it was recorded. Report this; TESSERA_COMPILE_SKIP "
        "leaves the pass out until then",
        e.what(), options.name);
    if (unoptimised) *unoptimised = e.what();
    return Executor(std::move(graph));
  }
  dump(fused, options, number, "optimised");
  try {
    add_code(fused);
    return Executor(std::move(fused));
  } catch (const UserError& e) {
    log::warn("compile: {}; {} runs without generated kernels", e.what(), options.name);
  }
  run_passes(graph, skip + (skip.empty() ? "" : ",") + "decompose,fuse", passes);
  return Executor(std::move(graph));
}

bool SizedBuilder::add_code(Graph& graph, FunctionRef<std::vector<Graph>()> probes) {
  std::vector<const Fused*> kernels = fused_ops(graph);
  std::vector<Graph> others;
  std::vector<SizedKernels::Family> families(kernels.size());
  if (!kernels_.have(kernels)) {
    if (kernels_.compilations() >= kMaxCompilations) return false;
    others = probes();
    for (Graph& g : others) {
      run_passes(g, passes_to_skip(options_));
      std::vector<const Fused*> same = fused_ops(g);
      if (same.size() != kernels.size()) continue;  // fused otherwise: not of these families
      for (size_t k = 0; k < same.size(); ++k) families[k].push_back(same[k]);
    }
  }
  set_code(graph, kernels_.code_of(kernels, families));
  return true;
}

Executor SizedBuilder::build(const Graph& graph, FunctionRef<std::vector<Graph>()> probes) {
  std::string skip = passes_to_skip(options_);
  Graph fused = graph;
  run_passes(fused, skip);
  try {
    if (add_code(fused, probes)) return Executor(std::move(fused), arena_);
  } catch (const UserError& e) {
    log::warn("compile: {}; {} runs without generated kernels", e.what(), options_.name);
  }
  fused = graph;
  run_passes(fused, skip + (skip.empty() ? "" : ",") + "decompose,fuse");
  return Executor(std::move(fused), arena_);
}

}  // namespace tessera::compiler
