// bench kernels: generated code of single bodies, beside the bandwidth of the level of memory that
// their operands and results fit in, and beside the same computation op by op. Bandwidth is
// measured by two sweeps that do nothing else: a copy of as many bytes, half read and half written,
// and one that reads and writes as many bytes as the kernel, which is the right comparison for a
// sum. Each is done with ordinary and with streaming stores, and the faster one counts. All are
// timed in turn, so that other programs slow all of them down alike. Before each that is larger
// than the caches, these are filled with other memory, so that it does not find what the one before
// left.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "compile/codegen/generate.h"
#include "compile/codegen/samples.h"
#include "core/autograd/autograd.h"
#include "core/base/parallel.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "examples/bench/commands.h"
#include "examples/bench/device.h"
#include "examples/bench/peaks.h"

namespace tessera::bench {
namespace {

struct Kernel {
  const char* name;
  compiler::Body (*body)(int64_t rows);
  Tensors (*eager)(const Tensors& in);  // the same op by op; null: it is one op
  int64_t large, small;  // rows: some 256 MB of memory, far beyond caches, and what stays in an L2
                         // cache of 1 MB
};

using compiler::BodyBuilder;
using compiler::InstrId;

Tensor row_sum(const Tensor& x) { return sum(x, {-1}, true); }
Tensor softmax_by_ops(const Tensor& x) {
  Tensor e = exp(x - amax(x, {-1}, true));
  return e / row_sum(e);
}
InstrId softmax(BodyBuilder& b, InstrId x) {
  InstrId e = b.op("exp", {b.op("sub", {x, b.reduce(ReduceKind::kMax, x, 2)})});
  return b.op("div", {e, b.sum(e, 2)});
}

// ---- normalisations

Tensors layer_norm_by_ops(const Tensors& in) {
  Tensor mean = row_sum(in[0]) * (1.0 / 768), d = in[0] - mean;
  Tensor rstd = rsqrt(row_sum(square(d)) * (1.0 / 768) + 1e-5);
  return {d * rstd * in[1] + in[2], mean, rstd};
}
Tensors layer_norm_grad_by_ops(const Tensors& in) {
  Shape one_each{in[0].size(0), 1};
  const Tensor &g = in[0], rstd = reshape(in[4], one_each);
  Tensor h = (in[1] - reshape(in[3], one_each)) * rstd, q = g * in[2];
  Tensor inner = q - row_sum(q) * (1.0 / 768) - h * (row_sum(q * h) * (1.0 / 768));
  return {inner * rstd, sum(g * h, {0}), sum(g, {0})};
}
compiler::Body residual_rms_norm(int64_t rows) {
  BodyBuilder b({rows, 1024});
  InstrId x = b.op("add", {b.load(3), b.load(3)}), w = b.load(2);
  InstrId var = b.op("mul", {b.sum(b.op("square", {x}), 2), b.constant(1.0 / 1024)});
  InstrId rstd = b.op("rsqrt", {b.op("add", {var, b.constant(1e-5)})});
  b.store(x), b.store(b.op("mul", {b.op("mul", {x, rstd}), w})), b.store(rstd);
  return b.body;
}
Tensors residual_rms_norm_by_ops(const Tensors& in) {
  Tensor x = in[0] + in[1], rstd = rsqrt(row_sum(square(x)) * (1.0 / 1024) + 1e-5);
  return {x, x * rstd * in[2], rstd};
}

// ---- pieces of attention and of blocks

compiler::Body masked_softmax(int64_t rows) {
  BodyBuilder b({rows, 1024});
  InstrId x = b.op("mul", {b.load(3), b.constant(0.125)});
  b.store(softmax(b, b.op("where", {b.load(2, kBool), b.constant(-1e30), x})));
  return b.body;
}
Tensors masked_softmax_by_ops(const Tensors& in) {
  return {softmax_by_ops(where(in[1], scalar_tensor(-1e30, kF32), in[0] * 0.125))};
}
compiler::Body softmax_grad(int64_t rows) {
  BodyBuilder b({rows, 1024});
  InstrId y = b.load(3), g = b.load(3), dot = b.sum(b.op("mul", {y, g}), 2);
  b.store(b.op("mul", {b.op("mul", {y, b.op("sub", {g, dot})}), b.constant(0.125)}));
  return b.body;
}
Tensors softmax_grad_by_ops(const Tensors& in) {
  return {in[0] * (in[1] - row_sum(in[0] * in[1])) * 0.125};
}
compiler::Body dropout_add(int64_t rows) {
  BodyBuilder b({rows, 1024});
  InstrId x = b.load(3), y = b.op("add", {b.load(3), b.load(2)}), zero = b.constant(0.0);
  InstrId kept = b.op("where", {b.load(3, kBool), b.op("mul", {y, b.constant(1.25)}), zero});
  b.store(b.op("add", {x, kept}));
  return b.body;
}
Tensors dropout_add_by_ops(const Tensors& in) {
  return {in[0] + where(in[3], (in[1] + in[2]) * 1.25, scalar_tensor(0.0, kF32))};
}
compiler::Body bias_gelu_tanh(int64_t rows) {
  BodyBuilder b({rows, 3072});
  b.store(b.op("gelu_tanh", {b.op("add", {b.load(3), b.load(2)})}));
  return b.body;
}

// ---- losses and optimizers

Tensors cross_entropy_by_ops(const Tensors& in) {
  const Tensor& x = in[0];
  const double inv = 1.0 / double(x.size(0));
  Tensor m = amax(x, {-1}, true), e = exp(x - m), s = row_sum(e);
  Tensor hit = eq(arange(0, x.size(1)), reshape(in[1], {x.size(0), 1}));
  Tensor zero = scalar_tensor(0.0, kF32), one = scalar_tensor(1.0, kF32);
  return {sum(log(s) + m - row_sum(where(hit, x, zero))) * inv,
          (e / s - where(hit, one, zero)) * inv};
}
Tensors adamw_by_ops(const Tensors& in) {
  const Tensor &p = in[0], &g = in[1], &lr = in[4];
  Tensor m = in[2] * 0.9 + g * 0.1, v = in[3] * 0.999 + square(g) * 0.001;
  return {p * (1.0 - lr * 0.01) - lr / in[5] * m / (sqrt(v) / sqrt(in[6]) + 1e-8), m, v};
}
compiler::Body sgd_momentum(int64_t rows) {
  BodyBuilder b({rows * 1024});
  InstrId p = b.load(1), g = b.load(1), m = b.load(1), lr = b.load(0);
  InstrId decayed = b.op("add", {g, b.op("mul", {p, b.constant(0.01)})});
  InstrId next = b.op("add", {b.op("mul", {m, b.constant(0.9)}), decayed});
  b.store(b.op("sub", {p, b.op("mul", {lr, next})})), b.store(next);
  return b.body;
}
Tensors sgd_momentum_by_ops(const Tensors& in) {
  Tensor m = in[2] * 0.9 + (in[1] + in[0] * 0.01);
  return {in[0] - in[3] * m, m};
}

const Kernel kKernels[] = {
    {"softmax [rows, 1024]", [](int64_t r) { return compiler::softmax_body(r, 1024); },
     [](const Tensors& in) { return Tensors{softmax_by_ops(in[0])}; }, 32768, 64},
    {"masked_softmax [rows, 1024]", masked_softmax, masked_softmax_by_ops, 32768, 64},
    {"softmax_grad [rows, 1024]", softmax_grad, softmax_grad_by_ops, 21840, 42},
    {"layer_norm [rows, 768]", [](int64_t r) { return compiler::layer_norm_body(r, 768); },
     layer_norm_by_ops, 40000, 100},
    {"layer_norm_grad [rows, 768]",
     [](int64_t r) { return compiler::layer_norm_grad_body(r, 768); }, layer_norm_grad_by_ops,
     28000, 64},
    {"residual_rms_norm [rows, 1024]", residual_rms_norm, residual_rms_norm_by_ops, 16384, 32},
    {"dropout_add [rows, 1024]", dropout_add, dropout_add_by_ops, 20160, 40},
    {"cross_entropy [rows, 50304]",
     [](int64_t r) { return compiler::cross_entropy_body(r, 50304); }, cross_entropy_by_ops, 640,
     2},
    {"adamw [rows, 1024]", [](int64_t r) { return compiler::adamw_body(r * 1024); }, adamw_by_ops,
     9200, 16},
    {"sgd_momentum [rows, 1024]", sgd_momentum, sgd_momentum_by_ops, 13104, 24},
    {"bias_gelu [rows, 3072]", [](int64_t r) { return compiler::bias_gelu_body(r, 3072); },
     [](const Tensors& in) { return Tensors{gelu(in[0] + in[1])}; }, 10800, 24},
    {"bias_gelu_tanh [rows, 3072]", bias_gelu_tanh,
     [](const Tensors& in) { return Tensors{gelu_tanh(in[0] + in[1])}; }, 10800, 24},
    {"sum [rows, 1024]",
     [](int64_t r) {
       BodyBuilder b({r, 1024});
       b.store(b.sum(b.load(3), 3));
       return b.body;
     },
     nullptr, 65536, 128},
    {"sum over rows [rows, 768]",
     [](int64_t r) {
       BodyBuilder b({r, 768});
       b.store(b.sum(b.load(3), 1));
       return b.body;
     },
     nullptr, 84000, 160},
};

struct Prepared {
  std::string name;
  Tensors in, out;
  Tensor scratch, from, to;  // of the copy
  std::vector<char*> p;
  double bytes = 0;
  int64_t read = 0, written = 0;  // of `bytes`
  Ref<const compiler::LoadedKernel> kernel;
  void run() { compiler::run_code(kernel->code, p.data(), static_cast<char*>(scratch.raw())); }
  void copy(Traffic traffic) {  // copies half of as many bytes
    copy_memory(traffic, static_cast<char*>(to.raw()), static_cast<const char*>(from.raw()),
                int64_t(bytes / 2) / 256 * 256);
  }
  void move(Traffic traffic) {  // reads and writes as many bytes as the kernel
    move_memory(traffic, static_cast<char*>(to.raw()), written,
                static_cast<const char*>(from.raw()), read);
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
  auto add = [&](const Tensors& list, int64_t& bytes) {
    for (const Tensor& t : list)
      r.p.push_back(static_cast<char*>(t.raw())), bytes += int64_t(t.nbytes());
  };
  add(r.in, r.read), add(r.out, r.written);
  r.bytes = double(r.read + r.written);
  r.scratch = zeros({int64_t(r.kernel->code.scratch_bytes) + 64}, {kU8});
  const int64_t half = int64_t(r.bytes / 2) / 256 * 256;
  // The values are random, since some processors move lines of zeros faster than others.
  r.from = randint(0, 256, {std::max(half, r.read)}, {kU8});
  r.to = randint(0, 256, {std::max(half, r.written)}, {kU8});
  r.name.replace(r.name.find("[rows") + 1, 4, std::to_string(rows));
  return r;
}

Json bench_kernels(int cpu, int samples, const std::string& only) {
  TESSERA_CHECK(samples >= 1, "bench kernels: --samples {}: expected at least 1", samples);
  std::vector<std::string> names;
  for (const Kernel& k : kKernels) names.push_back(k.name);
  check_only("kernels", only, names);
  bind_to_core(cpu);
  set_num_threads(1);
  NoGrad no_grad;
  int64_t largest = 0;  // of the caches
  for (const Level& level : memory_levels(1)) largest = std::max(largest, level.size);
  const Tensor others = randint(0, 256, {2 * largest}, {kU8});
  const std::function<void()> fill_caches = [&] {
    move_memory(Traffic::kCopy, nullptr, 0, static_cast<const char*>(others.raw()), 2 * largest);
  };
  std::vector<compiler::Body> bodies;
  std::vector<int64_t> rows;
  std::vector<const Kernel*> kinds;
  for (const Kernel& k : kKernels)
    for (int64_t r : {k.large, k.small})
      if (std::string_view(k.name).find(only) != std::string_view::npos)
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
  fmt::print("{:<34} {:>10} {:>12} {:>10} {:>8} {:>9} {:>12} {:>8}\n", "", "memory", "time", "GB/s",
             "of copy", "of moving", "op by op", "ratio");
  Json all{{"kernels", report.kernels}, {"generate_s", report.seconds}, {"rows", Json::array()}};
  for (size_t i = 0; i < bodies.size(); ++i) {
    Prepared k = prepare(*kinds[i], rows[i], bodies[i], kernels[i]);
    const int calls = std::max(1, int(2e7 / k.bytes));  // a sample long enough for the clock
    auto repeat = [&](auto&& work) {
      return std::function<void()>([calls, work] {
        for (int c = 0; c < calls; ++c) work();
      });
    };
    std::vector<std::function<void()>> timed = {
        repeat([&] { k.run(); }), repeat([&] { k.copy(Traffic::kCopy); }),
        repeat([&] { k.copy(Traffic::kStreamingCopy); }), repeat([&] { k.move(Traffic::kCopy); }),
        repeat([&] { k.move(Traffic::kStreamingCopy); })};
    if (kinds[i]->eager) timed.push_back(repeat([&] { keep(kinds[i]->eager(k.in)[0].raw()); }));
    std::vector<Stats> t =
        time_in_turn(timed, samples, k.bytes > double(largest) ? fill_caches : nullptr);
    double seconds = t[0].min / calls, copy = std::min(t[1].min, t[2].min) / calls,
           moving = std::min(t[3].min, t[4].min) / calls;
    fmt::print("{:<34} {:>10} {:>12} {:>10.1f} {:>8.2f} {:>9.2f}", k.name,
               bytes_text(int64_t(k.bytes)), time_text(seconds), k.bytes / seconds * 1e-9,
               copy / seconds, moving / seconds);
    Json row{{"what", k.name},
             {"bytes", k.bytes},
             {"seconds", seconds},
             {"copy_seconds", copy},
             {"moving_seconds", moving}};
    if (kinds[i]->eager) {
      fmt::print(" {:>12} {:>8.2f}", time_text(t[5].min / calls), t[5].min / t[0].min);
      row["eager_seconds"] = t[5].min / calls;
    }
    fmt::print("\n");
    all["rows"].push_back(row);
  }
  fmt::print(
      "best of {} samples; copy: as many bytes, half read, half written; moving: as many read and "
      "as many written; the faster of ordinary and streaming stores\n",
      samples);
  return all;
}

}  // namespace

void add_kernels(CLI::App& app, Run& run) {
  struct Options {
    int cpu = -1, samples = 15;
    std::string only;
  };
  auto o = std::make_shared<Options>();
  Subcommand sub(app, "kernels",
                 "generated kernels, or those of a device, beside the bandwidth of memory");
  sub.option("--cpu", o->cpu, "core to bind to; -1: the last");
  sub.option("--samples", o->samples, "samples of each kernel");
  sub.option("--only", o->only, "kernels whose names contain this");
  sub.clock_option();
  auto device = std::make_shared<DeviceOptions>();
  add_device_options(sub, *device, true);
  sub.runs(run, [o, device] {
    return device_for("kernels", *device).is_cpu() ? bench_kernels(o->cpu, o->samples, o->only)
                                                   : device_kernels(*device, o->only, o->samples);
  });
}

}  // namespace tessera::bench
