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

// Gives the fused ops of `graph` code.
void add_code(Graph& graph) {
  std::vector<Node*> nodes;
  std::vector<const Fused*> kernels;
  for (Node& n : graph.nodes)
    if (const Fused* fused = as_fused(*n.prim)) nodes.push_back(&n), kernels.push_back(fused);
  if (kernels.empty()) return;
  std::vector<Ref<const LoadedKernel>> code = generate(kernels, {});
  for (size_t i = 0; i < nodes.size(); ++i) {
    const Fused& f = *kernels[i];
    nodes[i]->prim = PrimRef(new Fused(f.name, f.body, f.results, code[i]));
  }
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

}  // namespace tessera::compiler
