#include "compile/build.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "compile/codegen/device_kernels.h"
#include "compile/codegen/generate.h"
#include "compile/codegen/streams.h"
#include "compile/passes/passes.h"
#include "compile/passes/recompute.h"
#include "compile/run/step_ranges.h"
#include "compile/run/stream_choice.h"
#include "core/base/env.h"
#include "core/base/log.h"

namespace tessera::compiler {
namespace {

constexpr const char* kMakeKernels = "decompose,fuse";  // passes whose ops need generated code

std::string joined(const std::string& a, const std::string& b) {
  return a + (a.empty() || b.empty() ? "" : ",") + b;
}
std::string passes_to_skip(const CompileOptions& options) {
  const bool bare = options.mode == CompileMode::kReduceOverhead;
  return joined(joined(options.skip, env::get("TESSERA_COMPILE_SKIP")), bare ? kMakeKernels : "");
}

// The program's own passes come first, then those of pipeline(), or `instead` in their place.
std::vector<Pass> all_passes(const CompileOptions& options, std::span<const Pass> instead = {}) {
  std::vector<Pass> passes = options.passes;
  const std::span<const Pass> rest = instead.empty() ? std::span<const Pass>(pipeline()) : instead;
  passes.insert(passes.end(), rest.begin(), rest.end());
  return passes;
}

const Fused* on_cpu(const Node& n) {
  const Fused* fused = as_fused(*n.prim);
  return fused && fused->device().is_cpu() ? fused : nullptr;
}

bool on_device(const Node& n) {
  const Fused* fused = as_fused(*n.prim);
  return fused && !fused->device().is_cpu();
}

std::vector<const Fused*> fused_ops(const Graph& graph) {
  std::vector<const Fused*> kernels;
  for (const Node& n : graph.nodes)
    if (const Fused* fused = on_cpu(n)) kernels.push_back(fused);
  return kernels;
}

void set_code(Graph& graph, std::span<const Ref<const LoadedKernel>> code) {
  size_t k = 0;
  for (Node& n : graph.nodes)
    if (const Fused* f = on_cpu(n))
      n.prim = PrimRef(new Fused(f->name, f->body, f->results, code[k++]));
}

// The operands of a fused op on a device that are numbers of the host; none where the executor
// copies these to the device.
uint64_t host_numbers(const Graph& graph, const Node& n) {
  uint64_t numbers = 0;
  if (captures_steps(as_fused(*n.prim)->device())) return numbers;
  for (size_t k = 0; k < n.in.size(); ++k)
    numbers |= uint64_t(is_host_number(graph[n.in[k]].meta)) << k;
  return numbers;
}

// Generates code for the fused ops on devices.
void add_device_code(Graph& graph) {
  std::map<std::pair<DeviceKind, int>, std::vector<Node*>> by_device;
  for (Node& n : graph.nodes)
    if (on_device(n)) {
      const Device d = as_fused(*n.prim)->device();
      by_device[{d.kind, d.index}].push_back(&n);
    }
  for (const auto& [device, nodes] : by_device) {
    std::vector<DeviceSource> sources;
    for (const Node* n : nodes) sources.push_back({as_fused(*n->prim), host_numbers(graph, *n)});
    auto code = generate_on(as_fused(*nodes[0]->prim)->device(), sources);
    for (size_t k = 0; k < nodes.size(); ++k) {
      const Fused& f = *sources[k].fused;
      nodes[k]->prim = PrimRef(new Fused(f.name, f.body, f.results, code[k]));
    }
  }
}

// Generates code for the fused ops of `graph` and puts it into them.
void add_code(Graph& graph) {
  std::vector<const Fused*> kernels = fused_ops(graph);
  if (!kernels.empty()) set_code(graph, generate(kernels, {}));
  add_device_code(graph);
}

// Writes the graph into the folder that TESSERA_COMPILE_DUMP names: "step.2.recorded.4711.txt" is
// the second graph of process 4711, as it was recorded.
void dump(const Graph& graph, const CompileOptions& options, int number, const char* stage) {
  std::string folder = env::get("TESSERA_COMPILE_DUMP");
  if (folder.empty()) return;
  std::error_code said_below;
  std::filesystem::create_directories(folder, said_below);
  std::ofstream file(
      fmt::format("{}/{}.{}.{}.{}.txt", folder, options.name, number, stage, getpid()));
  file << to_string(graph);
  if (!file.flush()) logging::warn("compile: TESSERA_COMPILE_DUMP: cannot write to {}", folder);
}

size_t memory_limit(const CompileOptions& options) {
  if (options.memory_limit) return options.memory_limit;
  return size_t(env::get_int("TESSERA_COMPILE_MEMORY", 0, 0, 1'000'000'000)) * 1'000'000;
}

// Returns `graph` with the fewest values computed again in backward that keep a run within `limit`
// bytes. If no choice does, returns the one that needs least memory. Each try is planned to the
// byte.
Graph within_memory(const Graph& graph, size_t limit, std::string_view skip,
                    std::span<const Pass> passes, const std::string& name) {
  auto peak = [&](const Graph& g) {
    Graph optimised = g;
    run_passes(optimised, skip, passes);
    MemoryPlan plan = Executor(std::move(optimised)).memory();
    return plan.arena_bytes + plan.output_bytes;
  };
  std::vector<std::vector<int32_t>> groups = recomputable(graph);
  auto with_first = [&](size_t count) {
    std::vector<int32_t> nodes;
    for (size_t i = 0; i < count; ++i)
      nodes.insert(nodes.end(), groups[i].begin(), groups[i].end());
    return recomputed(graph, nodes);
  };
  Graph best = graph;
  size_t best_peak = peak(graph);
  if (best_peak <= limit) return best;
  for (size_t low = 0, high = groups.size(); low < high;) {  // `low` groups are too few
    size_t count = low + (high - low + 1) / 2;
    Graph g = with_first(count);
    size_t p = peak(g);
    if (p <= limit || p < best_peak) best = std::move(g), best_peak = p;
    if (p > limit)
      low = count;
    else if (high == count)
      break;
    else
      high = count;
  }
  if (best_peak > limit)
    logging::warn("compile: {} takes {:.1f} MB beside its state, more than the limit of {:.1f} MB",
                  name, double(best_peak) / 1e6, double(limit) / 1e6);
  return best;
}

}  // namespace

CompileMode parse_compile_mode(std::string_view text) {
  if (text == "default") return CompileMode::kDefault;
  if (text == "reduce-overhead") return CompileMode::kReduceOverhead;
  if (text == "max-autotune") return CompileMode::kMaxAutotune;
  throw UserError(fmt::format(
      "compile: unknown mode \"{}\"; expected default, reduce-overhead or max-autotune", text));
}

Executor build(Graph graph, const CompileOptions& options, int number, std::string* unoptimised,
               std::span<const Pass> instead, std::shared_ptr<StepRanks> ranks) {
  const ExecutorOptions how{.tunes = options.mode == CompileMode::kMaxAutotune,
                            .ranks = std::move(ranks)};
  const std::string skip = passes_to_skip(options);
  const std::vector<Pass> passes = all_passes(options, instead);
  check_passes(skip, passes);
  dump(graph, options, number, "recorded");
  const size_t limit = memory_limit(options);
  streamed_from(), streams_wanted();  // bad variables are the user's error, not a pass's
  Graph fused = graph;
  try {
    if (limit) fused = within_memory(graph, limit, skip, passes, options.name);
    run_passes(fused, skip, passes);
  } catch (const std::exception& e) {
    // Slower is better than not at all; the text says which pass, so it can be left out or mended.
    logging::warn(
        "compile: {}; {} runs its graph as it was recorded. Report this; TESSERA_COMPILE_SKIP "
        "leaves the pass out until then",
        e.what(), options.name);
    if (unoptimised) *unoptimised = e.what();
    return Executor(std::move(graph), how);
  }
  dump(fused, options, number, "optimised");
  try {
    add_code(fused);
    return Executor(std::move(fused), how);
  } catch (const std::exception& e) {
    logging::warn("compile: {}; {} runs without generated kernels", e.what(), options.name);
  }
  run_passes(graph, joined(skip, kMakeKernels), passes);
  return Executor(std::move(graph), how);
}

bool SizedBuilder::add_code(Graph& graph, FunctionRef<std::vector<Graph>()> probes) {
  std::vector<const Fused*> kernels = fused_ops(graph);
  std::vector<Graph> others;
  std::vector<SizedKernels::Sizes> sizes(kernels.size());
  if (!kernels_.have(kernels)) {
    if (kernels_.compilations() >= kMaxCompilations) return false;
    others = probes();
    for (Graph& g : others) {
      run_passes(g, passes_to_skip(options_), all_passes(options_));
      std::vector<const Fused*> same = fused_ops(g);
      // Other sizes made it fuse otherwise: it tells nothing about these kernels.
      if (same.size() != kernels.size()) continue;
      for (size_t k = 0; k < same.size(); ++k) sizes[k].push_back(same[k]);
    }
  }
  set_code(graph, kernels_.code_of(kernels, sizes));
  // Code for a device is made for each size: none takes sizes at run time.
  if (std::ranges::any_of(graph.nodes, on_device)) {
    if (device_compilations_++ >= kMaxCompilations) return false;
    add_device_code(graph);
  }
  return true;
}

Executor SizedBuilder::build(const Graph& graph, FunctionRef<std::vector<Graph>()> probes) {
  const std::string skip = passes_to_skip(options_);
  const std::vector<Pass> passes = all_passes(options_);
  const ExecutorOptions how{.arena = arena_, .ranks = ranks_};
  Graph fused = graph;
  run_passes(fused, skip, passes);
  try {
    if (add_code(fused, probes)) return Executor(std::move(fused), how);
  } catch (const std::exception& e) {
    logging::warn("compile: {}; {} runs without generated kernels", e.what(), options_.name);
  }
  fused = graph;
  run_passes(fused, joined(skip, kMakeKernels), passes);
  return Executor(std::move(fused), how);
}

}  // namespace tessera::compiler
