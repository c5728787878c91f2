// bench kernels: generated code of single bodies beside the copy bandwidth of the level of memory
// that their operands and results fit in. Kernel and copy are timed in turn: what other programs
// take from one they take from both.
#include <fmt/core.h>

#include <cstring>

#include "compile/codegen/generate.h"
#include "compile/codegen/samples.h"
#include "core/base/parallel.h"
#include "core/ops/create.h"
#include "core/ops/random.h"
#include "examples/bench/commands.h"

namespace tessera::bench {
namespace {

struct Kernel {
  const char* name;
  compiler::Body (*body)(int64_t rows);
  int64_t large, small;  // rows: some 256 MB of memory, far beyond caches, and what stays in an L2
                         // cache of 1 MB
};

const Kernel kKernels[] = {
    {"softmax [rows, 1024]", [](int64_t r) { return compiler::softmax_body(r, 1024); }, 32768, 64},
    {"layer_norm [rows, 768]", [](int64_t r) { return compiler::layer_norm_body(r, 768); }, 40000,
     100},
    {"layer_norm_grad [rows, 768]",
     [](int64_t r) { return compiler::layer_norm_grad_body(r, 768); }, 28000, 64},
    {"cross_entropy [rows, 50304]",
     [](int64_t r) { return compiler::cross_entropy_body(r, 50304); }, 640, 2},
    {"adamw [rows, 1024]", [](int64_t r) { return compiler::adamw_body(r * 1024); }, 9200, 16},
    {"bias_gelu [rows, 3072]", [](int64_t r) { return compiler::bias_gelu_body(r, 3072); }, 10800,
     24},
    {"sum [rows, 1024]",
     [](int64_t r) {
       compiler::BodyBuilder b({r, 1024});
       b.store(b.sum(b.load(3), 3));
       return b.body;
     },
     65536, 128},
    {"sum over rows [rows, 768]",
     [](int64_t r) {
       compiler::BodyBuilder b({r, 768});
       b.store(b.sum(b.load(3), 1));
       return b.body;
     },
     84000, 160},
};

struct Prepared {
  std::string name;
  Tensors in, out;
  Tensor scratch, from, to;  // of the copy
  std::vector<char*> p;
  double bytes = 0;
  Ref<const compiler::LoadedKernel> kernel;
  void run() { compiler::run_code(kernel->code, p.data(), static_cast<char*>(scratch.raw())); }
  void copy() {  // as many bytes read and written together
    float *a = from.data<float>(), *b = to.data<float>();
    const int64_t n = from.numel();
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) b[i] = a[i];
    keep(b);
  }
};

Tensor memory_of(const compiler::Body& body, const compiler::Access& a) {
  Shape shape = compiler::meta_of(body, a).shape;
  if (is_floating(a.dtype)) return rand(shape, {a.dtype});
  return zeros(shape, {a.dtype});
}

Prepared prepare(const Kernel& k, int64_t rows, const compiler::Body& body,
                 Ref<const compiler::LoadedKernel> kernel) {
  Prepared r;
  r.name = k.name;
  r.kernel = std::move(kernel);
  for (const compiler::Access& a : body.operands) r.in.push_back(memory_of(body, a));
  for (const compiler::Store& s : body.stores) r.out.push_back(memory_of(body, s.to));
  for (auto* list : {&r.in, &r.out})
    for (const Tensor& t : *list)
      r.p.push_back(static_cast<char*>(t.raw())), r.bytes += double(t.nbytes());
  r.scratch = zeros({int64_t(r.kernel->code.scratch_bytes) + 64}, {kU8});
  r.from = zeros({int64_t(r.bytes / 8)}), r.to = zeros({int64_t(r.bytes / 8)});
  r.name.replace(r.name.find("[rows") + 1, 4, std::to_string(rows));
  return r;
}

Json bench_kernels(int cpu, int samples) {
  bind_to_core(cpu);
  set_num_threads(1);
  std::vector<compiler::Body> bodies;
  std::vector<int64_t> rows;
  std::vector<const Kernel*> kinds;
  for (const Kernel& k : kKernels)
    for (int64_t r : {k.large, k.small})
      bodies.push_back(k.body(r)), rows.push_back(r), kinds.push_back(&k);
  std::vector<PrimRef> made;
  std::vector<const compiler::Fused*> fused;
  for (size_t i = 0; i < bodies.size(); ++i) {
    std::string name(kinds[i]->name, std::strcspn(kinds[i]->name, " "));
    made.push_back(PrimRef(new compiler::Fused(name, bodies[i], compiler::results_of(bodies[i]))));
    fused.push_back(compiler::as_fused(*made.back()));
  }
  compiler::GenerateReport report;
  auto kernels = compiler::generate(fused, {}, &report);
  fmt::print("{} kernels, {} compiled now, {:.2f} s; {}\n", report.kernels, report.compiled,
             report.seconds, load_text());
  fmt::print("{:<34} {:>10} {:>12} {:>10} {:>8}\n", "", "memory", "time", "GB/s", "of copy");
  Json all{{"kernels", report.kernels}, {"generate_s", report.seconds}, {"rows", Json::array()}};
  for (size_t i = 0; i < bodies.size(); ++i) {
    Prepared k = prepare(*kinds[i], rows[i], bodies[i], kernels[i]);
    const int calls = std::max(1, int(2e7 / k.bytes));  // a sample: long enough for the clock
    auto repeat = [&](auto&& work) {
      return std::function<void()>([calls, work] {
        for (int c = 0; c < calls; ++c) work();
      });
    };
    std::vector<Stats> t =
        time_in_turn({repeat([&] { k.run(); }), repeat([&] { k.copy(); })}, samples);
    double seconds = t[0].min / calls, copy = t[1].min / calls;
    fmt::print("{:<34} {:>10} {:>12} {:>10.1f} {:>8.2f}\n", k.name, bytes_text(int64_t(k.bytes)),
               time_text(seconds), k.bytes / seconds * 1e-9, copy / seconds);
    all["rows"].push_back(
        {{"what", k.name}, {"bytes", k.bytes}, {"seconds", seconds}, {"copy_seconds", copy}});
  }
  fmt::print("best of {} samples; copies move the same number of bytes, half read, half written\n",
             samples);
  return all;
}

}  // namespace

void add_kernels(CLI::App& app, Run& run) {
  struct Options {
    int cpu = -1, samples = 15;
  };
  auto o = std::make_shared<Options>();
  CLI::App* sub =
      app.add_subcommand("kernels", "generated kernels beside the bandwidth of a plain copy");
  sub->add_option("--cpu", o->cpu, "core to bind to; -1: the last")->capture_default_str();
  sub->add_option("--samples", o->samples, "of each kernel")->capture_default_str();
  add_clock_option(*sub);
  sub->callback([o, &run] { run = [o] { return bench_kernels(o->cpu, o->samples); }; });
}

}  // namespace tessera::bench
