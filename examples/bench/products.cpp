// bench products: matrix products by oneDNN and by our packed kernel, whichever of them contract
// would choose, warm (the same operands repeatedly) and from memory further away (operands in turn,
// too many for the L2 cache). The choice between the two in gemm.cpp rests on these numbers.
#include <fmt/core.h>

#include <algorithm>

#include "core/backend/cpu/gemm.h"
#include "core/base/parallel.h"
#include "core/ops/create.h"
#include "examples/bench/commands.h"
#include "examples/bench/contractions.h"
#include "examples/bench/peaks.h"

namespace tessera::bench {
namespace {

constexpr double kFarBytes = 24e6;  // of the operands that are taken in turn

struct Layout {
  const char* name;
  bool a_columns, b_columns;  // the operand is stored transposed
};
constexpr Layout kLayouts[] = {{"x w'", false, true}, {"g w", false, false}, {"g' x", true, false}};

struct Extents {
  int64_t m, n, k;
};
constexpr Extents kExtents[] = {
    {64, 64, 64},      {128, 128, 128},   {256, 256, 256},  {768, 128, 128},   {768, 512, 128},
    {768, 128, 512},   {512, 128, 768},   {512, 512, 512},  {1024, 1024, 512}, {1024, 1024, 1024},
    {2048, 768, 768},  {2048, 3072, 768}, {512, 768, 3072}, {768, 3072, 512},  {1024, 768, 768},
    {1024, 768, 3072}, {3072, 768, 1024}};

Product product_of(const Extents& e, const Layout& l) {
  Product p;
  p.m = {e.m, l.a_columns ? 1 : e.k, 0, e.n};
  p.n = {e.n, 0, l.b_columns ? e.k : 1, 1};
  p.k = {e.k, l.a_columns ? e.m : 1, l.b_columns ? 1 : e.n, 0};
  return p;
}

// The packed kernel with operands of its own.
class PackedProduct {
 public:
  explicit PackedProduct(const Product& p)
      : a_(quarters(p.m.extent * p.k.extent, p.bf16)),
        b_(quarters(p.k.extent * p.n.extent, p.bf16)),
        c_(quarters(p.m.extent * p.n.extent, p.bf16)) {
    g_.dtype = p.bf16 ? kBF16 : kF32;
    g_.m = p.m.extent, g_.n = p.n.extent, g_.k = p.k.extent;
    g_.a_m = p.m.a, g_.a_k = p.k.a, g_.b_k = p.k.b, g_.b_n = p.n.b, g_.c_m = p.m.c;
    work_ = empty({int64_t(cpu::packed_gemm_workspace(g_, 0))}, kU8);
  }
  void run() { cpu::run_packed_gemm(g_, 0, a_.raw(), b_.raw(), c_.raw(), work_.raw()); }

 private:
  static Tensor quarters(int64_t n, bool bf16) {
    return full({n}, 0.25, {.dtype = bf16 ? kBF16 : kF32});
  }
  cpu::Gemm g_;
  Tensor a_, b_, c_, work_;
};

struct Rates {
  double library, packed;  // flops per second
};

// Times both in turn, on `copies` products each.
Rates measure(const Product& p, int64_t copies) {
  std::vector<BareProduct> library;
  std::vector<PackedProduct> packed;
  for (int64_t i = 0; i < copies; ++i) library.emplace_back(p), packed.emplace_back(p);
  const int64_t repeats = std::max<int64_t>(1, int64_t(2e8 / p.flops()) / copies);
  auto all = [&](auto& products) {
    for (int64_t r = 0; r < repeats; ++r)
      for (auto& x : products) x.run();
  };
  std::vector<Stats> t = time_in_turn({[&] { all(library); }, [&] { all(packed); }}, kSamples);
  const double flops = p.flops() * double(repeats * copies);
  return {flops / t[0].median, flops / t[1].median};
}

constexpr Extents kSquares[] = {{1024, 1024, 1024}, {2048, 2048, 2048}, {4096, 4096, 4096}};

// Times bf16 products, as contract computes them, beside those of f32 by the library.
Json bench_bf16_products(int cpu) {
  bind_to_core(cpu);
  set_num_threads(1);
  const double peak = measure_bf16_peak(), wide_peak = measure_fma_peak();
  TESSERA_CHECK(peak > 0, "bench products: this CPU has no bf16 dot instructions");
  fmt::print("GF/s of products, one bound core, warm; peaks bf16 {:.1f}, f32 {:.1f}, {}\n",
             peak * 1e-9, wide_peak * 1e-9, load_text());
  fmt::print("{:>6} {:>6} {:>6}  {:<6} {:>8} {:>6} {:>8} {:>6} {:>6} {:>8} {:>6}\n", "m", "n", "k",
             "", "library", "peak", "packed", "peak", "", "f32 lib", "peak");
  Json rows;
  auto measure_both = [&](const Extents& e) {
    for (const Layout& l : kLayouts) {
      Product wide = product_of(e, l), low = wide;
      low.bf16 = true;
      BareProduct in_low(low), in_wide(wide);
      PackedProduct in_packed(low);
      const int64_t repeats = std::max<int64_t>(1, int64_t(1e8 / wide.flops()));
      auto run = [&](auto& p) {
        return [&p, repeats] {
          for (int64_t i = 0; i < repeats; ++i) p.run();
        };
      };
      std::vector<Stats> t = time_in_turn({run(in_low), run(in_wide), run(in_packed)}, kSamples);
      const double flops = wide.flops() * double(repeats), rate = flops / t[0].median,
                   wide_rate = flops / t[1].median, packed = flops / t[2].median;
      fmt::print(
          "{:>6} {:>6} {:>6}  {:<6} {:>8.1f} {:>5.1f}% {:>8.1f} {:>5.1f}% {:>6.2f} {:>8.1f} "
          "{:>5.1f}%\n",
          e.m, e.n, e.k, l.name, rate * 1e-9, rate / peak * 100, packed * 1e-9, packed / peak * 100,
          packed / rate, wide_rate * 1e-9, wide_rate / wide_peak * 100);
      rows.push_back({{"m", e.m},
                      {"n", e.n},
                      {"k", e.k},
                      {"layout", l.name},
                      {"bf16", rate},
                      {"bf16_packed", packed},
                      {"f32", wide_rate}});
    }
  };
  for (const Extents& e : kExtents)
    if (e.m != e.n || e.m < 1024) measure_both(e);
  for (const Extents& e : kSquares) measure_both(e);
  return {{"bf16_peak", peak}, {"peak", wide_peak}, {"products", rows}};
}

Json bench_products(int cpu) {
  bind_to_core(cpu);
  set_num_threads(1);
  const double peak = measure_fma_peak();
  fmt::print("GF/s of f32 products, one bound core, peak {:.1f}, {}\n", peak * 1e-9, load_text());
  fmt::print("{:>6} {:>6} {:>6}  {:<6} {:>8} {:>8} {:>6} {:>10} {:>8} {:>6}\n", "m", "n", "k", "",
             "warm: lib", "packed", "", "far: lib", "packed", "");
  Json rows;
  for (const Extents& e : kExtents)
    for (const Layout& l : kLayouts) {
      const Product p = product_of(e, l);
      const double bytes = 4.0 * double(e.m * e.k + e.k * e.n + e.m * e.n);
      const Rates warm = measure(p, 1), far = measure(p, int64_t(kFarBytes / bytes) + 1);
      fmt::print(
          "{:>6} {:>6} {:>6}  {:<6} {:>9.1f} {:>8.1f} {:>6.2f} {:>10.1f} {:>8.1f} {:>6.2f}\n", e.m,
          e.n, e.k, l.name, warm.library * 1e-9, warm.packed * 1e-9, warm.packed / warm.library,
          far.library * 1e-9, far.packed * 1e-9, far.packed / far.library);
      rows.push_back({{"m", e.m},
                      {"n", e.n},
                      {"k", e.k},
                      {"layout", l.name},
                      {"bytes", bytes},
                      {"warm", {{"library", warm.library}, {"packed", warm.packed}}},
                      {"far", {{"library", far.library}, {"packed", far.packed}}}});
    }
  return {{"peak", peak}, {"products", rows}};
}

}  // namespace

void add_products(CLI::App& app, Run& run) {
  auto cpu = std::make_shared<int>(-1);
  auto bf16 = std::make_shared<bool>(false);
  Subcommand sub(app, "products",
                 "matrix products by oneDNN and by the packed kernel, by shape and layout");
  sub.option("--cpu", *cpu, "core to bind to; -1: the last");
  sub.flag("--bf16", *bf16, "products of bf16 beside those of f32, as shares of both peaks");
  sub.clock_option();
  sub.runs(run, [cpu, bf16] { return *bf16 ? bench_bf16_products(*cpu) : bench_products(*cpu); });
}

}  // namespace tessera::bench
