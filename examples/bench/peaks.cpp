#include "examples/bench/peaks.h"

#include <algorithm>

#include "core/base/isa.h"
#include "examples/bench/measure.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace tessera::bench {
namespace {

constexpr int64_t kRounds = 100000;
constexpr int kTries = 15;

#ifdef __x86_64__
// Enough independent chains to cover the latency of both pipes.
[[gnu::target("avx512f"), gnu::optimize("O3")]] double fma_v4(int64_t rounds) {
  constexpr int kChains = 16;
  __m512 acc[kChains], x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(1e-6f);
  for (auto& a : acc) a = _mm512_set1_ps(1.0f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) acc[i] = _mm512_fmadd_ps(acc[i], x, y);
  }
  for (auto& a : acc) keep(a[0]);
  return double(rounds) * kChains * 16 * 2;
}

[[gnu::target("avx2,fma"), gnu::optimize("O3")]] double fma_v3(int64_t rounds) {
  constexpr int kChains = 12;
  __m256 acc[kChains], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1e-6f);
  for (auto& a : acc) a = _mm256_set1_ps(1.0f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = _mm256_fmadd_ps(acc[i], x, y);
  }
  for (auto& a : acc) keep(a[0]);
  return double(rounds) * kChains * 8 * 2;
}

[[gnu::target("avx512f,avx512bf16"), gnu::optimize("O3")]] double dot_bf16(int64_t rounds) {
  constexpr int kChains = 24;
  __m512 acc[kChains];
  __m512bh x, y;
  float one = 1.0f;
  keep(one);
  x = y = _mm512_cvtne2ps_pbh(_mm512_set1_ps(one), _mm512_set1_ps(one));
  for (auto& a : acc) a = _mm512_setzero_ps();
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) acc[i] = _mm512_dpbf16_ps(acc[i], x, y);
  }
  for (auto& a : acc) keep(a[0]);
  return double(rounds) * kChains * 32 * 2;
}
#endif

// A multiply and an add of the baseline instruction set.
double multiply_add_base(int64_t rounds) {
  constexpr int kChains = 8;
  using Vector [[gnu::vector_size(16)]] = float;
  Vector acc[kChains], x = {0.999f, 0.999f, 0.999f, 0.999f}, y = {1e-6f, 1e-6f, 1e-6f, 1e-6f};
  for (auto& a : acc) a = Vector{1, 1, 1, 1};
  for (int64_t r = 0; r < rounds; ++r)
    for (auto& a : acc) a = a * x + y;
  for (auto& a : acc) keep(a[0]);
  return double(rounds) * kChains * 4 * 2;
}

double best_rate(double (*kernel)(int64_t)) {
  kernel(kRounds);
  double best = 0;
  for (int i = 0; i < kTries; ++i) {
    Stopwatch w;
    double flops = kernel(kRounds);
    best = std::max(best, flops / w.seconds());
  }
  return best;
}

}  // namespace

double measure_fma_peak() {
#ifdef __x86_64__
  if (cpu::current_isa() == cpu::Isa::kV4) return best_rate(fma_v4);
  if (cpu::current_isa() == cpu::Isa::kV3) return best_rate(fma_v3);
#endif
  return best_rate(multiply_add_base);
}

double measure_bf16_peak() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512bf16")) return best_rate(dot_bf16);
#endif
  return 0;
}

}  // namespace tessera::bench
