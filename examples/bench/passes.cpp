// bench passes: what the compiler's passes make of a training step: the numbers of kernels and of
// bytes that they read and write, counted from the graph, and the time of a step run eagerly, as a
// planned graph, and as a planned graph after the passes, with generated code. All are measured in
// one run, in turn.
#include "compile/passes/passes.h"

#include <fmt/core.h>

#include "compile/codegen/generate.h"
#include "compile/ir/verify.h"
#include "compile/record/trace.h"
#include "compile/run/executor.h"
#include "core/base/parallel.h"
#include "core/base/profile.h"
#include "examples/bench/commands.h"
#include "examples/bench/workload.h"

namespace tessera::bench {
namespace {

struct PassesOptions {
  WorkloadOptions workload;
  int samples = 31;
  int cpu = -1;
  bool time = true, kernels = false;
  std::string skip;
};

struct Counts {
  int kernels = 0, fused = 0;
  double bytes = 0;
};

bool runs(const compiler::Node& n) {
  return n.role != compiler::Role::kView && n.role != compiler::Role::kConstant;
}

// The bytes of the elements that a value sees, each counted once.
double bytes_of(const Meta& m) {
  double bytes = double(size_of(m.dtype));
  for (int d = 0; d < m.shape.size(); ++d)
    if (m.strides[d] != 0) bytes *= double(m.shape[d]);
  return bytes;
}

double bytes_of(const compiler::Graph& g, const compiler::Node& n) {
  double bytes = 0;
  for (auto* list : {&n.in, &n.out})
    for (compiler::ValueId id : *list)
      if (g[id].buffer != compiler::kNoBuffer) bytes += bytes_of(g[id].meta);
  return bytes;
}

Counts count(const compiler::Graph& g) {
  Counts c;
  for (const compiler::Node& n : g.nodes) {
    if (!runs(n)) continue;
    ++c.kernels, c.fused += compiler::as_fused(*n.prim) != nullptr;
    c.bytes += bytes_of(g, n);
  }
  return c;
}

compiler::Graph record(Workload& work) {
  compiler::Trace trace({.names = work.state()});
  return trace.finish({work.train()});
}

double generate_code(compiler::Graph& g) {
  std::vector<const compiler::Fused*> kernels;
  for (const compiler::Node& n : g.nodes)
    if (const compiler::Fused* f = compiler::as_fused(*n.prim)) kernels.push_back(f);
  compiler::GenerateReport report;
  auto code = compiler::generate(kernels, {}, &report);
  size_t next = 0;
  for (compiler::Node& n : g.nodes)
    if (const compiler::Fused* f = compiler::as_fused(*n.prim))
      n.prim = PrimRef(new compiler::Fused(f->name, f->body, f->results, code[next++]));
  fmt::print("code            {} distinct kernels, {} compiled now, {:.2f} s\n", report.kernels,
             report.compiled, report.seconds);
  return report.seconds;
}

// Prints the time of a run by kernel.
void print_kernels(compiler::Executor& run) {
  constexpr int kRuns = 5;
  Profiler profiler;
  for (int i = 0; i < kRuns; ++i) run.run({});
  fmt::print("{} runs:\n{}", kRuns, profile_table(profiler.profile()->events(), 100));
}

Json bench_passes(const PassesOptions& o) {
  TESSERA_CHECK(o.samples >= kSamples, "bench passes: --samples {}: a median takes at least {}",
                o.samples, kSamples);
  bind_to_core(o.cpu);
  set_num_threads(1);
  Workload work(o.workload);
  for (int i = 0; i < 3; ++i) work.step();
  compiler::Graph before = record(work), after = before;
  Stopwatch watch;
  compiler::run_passes(after, o.skip);
  double seconds = watch.seconds();
  Counts a = count(before), b = count(after);
  fmt::print("{}: {} parameters, batch {}, {}\n", o.workload.model, work.parameters(),
             work.batch_size(), load_text());
  fmt::print("passes          {:.1f} ms for {} nodes\n", seconds * 1e3, before.nodes.size());
  fmt::print("kernels         {} -> {} ({} fused)\n", a.kernels, b.kernels, b.fused);
  fmt::print("bytes moved     {:.2f} MB -> {:.2f} MB\n", a.bytes * 1e-6, b.bytes * 1e-6);
  Json json{{"model", o.workload.model},        {"batch_size", work.batch_size()},
            {"passes_ms", seconds * 1e3},       {"nodes", before.nodes.size()},
            {"kernels_before", a.kernels},      {"kernels_after", b.kernels},
            {"kernels_fused", b.fused},         {"megabytes_before", a.bytes * 1e-6},
            {"megabytes_after", b.bytes * 1e-6}};
  if (!o.time) return json;
  json["generate_s"] = generate_code(after);
  compiler::Executor plain(std::move(before)), compiled(std::move(after));
  auto arena = [](const compiler::Executor& e) { return double(e.memory().arena_bytes) * 1e-6; };
  fmt::print("intermediates   {:.2f} MB -> {:.2f} MB, planned\n", arena(plain), arena(compiled));
  json["arena_megabytes_before"] = arena(plain), json["arena_megabytes_after"] = arena(compiled);
  for (int i = 0; i < 3; ++i) plain.run({}), compiled.run({});
  std::vector<Stats> t = time_in_turn(
      {[&] { work.step(); }, [&] { plain.run({}); }, [&] { compiled.run({}); }}, o.samples);
  const char* names[] = {"eager", "planned", "fused"};
  for (size_t i = 0; i < t.size(); ++i) {
    fmt::print("{:<15} {:.3f} ms (quartiles {:.3f} to {:.3f}, {} samples)\n", names[i],
               t[i].median * 1e3, t[i].q1 * 1e3, t[i].q3 * 1e3, t[i].samples);
    json[std::string(names[i]) + "_ms"] = to_json(t[i], 1e3);
  }
  if (o.kernels) {
    fmt::print("\nplanned\n"), print_kernels(plain);
    fmt::print("\nfused\n"), print_kernels(compiled);
  }
  return json;
}

}  // namespace

void add_passes(CLI::App& app, Run& run) {
  auto o = std::make_shared<PassesOptions>();
  Subcommand sub(app, "passes",
                 "a training step before and after the compiler's passes: kernels, bytes, time");
  add_workload_options(sub, o->workload);
  sub.option("--samples", o->samples, "steps that are timed");
  sub.option("--skip", o->skip, "passes to leave out, by name: cse,fuse");
  sub.option("--cpu", o->cpu, "core to bind to; -1: the last");
  sub.flag("!--count-only", o->time, "count, but time nothing");
  sub.flag("--kernels", o->kernels, "print where the time of a run goes");
  sub.clock_option();
  sub.runs(run, [o] { return bench_passes(*o); });
}

}  // namespace tessera::bench
