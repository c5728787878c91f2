#include "examples/bench/peaks.h"

#include <algorithm>
#include <cstring>
#include <fstream>

#include "core/base/isa.h"
#include "core/tensor/tensor.h"
#include "examples/bench/measure.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace tessera::bench {
namespace {

constexpr int64_t kRounds = 100000;
constexpr int kTries = 15;

#ifdef __x86_64__
// There are enough independent chains to cover the latency of both pipes.
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

// A multiply and an add, for the baseline instruction set.
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

// The loops over memory, written once over a vector type and inlined into functions of each
// instruction set.
template <class V>
[[gnu::always_inline]] inline void read_loop(const char* p, int64_t bytes) {
  constexpr int kUnroll = 8;
  V sum[kUnroll] = {};
  for (int64_t i = 0; i + int64_t(sizeof(V)) * kUnroll <= bytes; i += int64_t(sizeof(V)) * kUnroll)
#pragma GCC unroll 8
    for (int k = 0; k < kUnroll; ++k)
      sum[k] ^= *reinterpret_cast<const V*>(p + i + int64_t(sizeof(V)) * k);
  for (V& s : sum) keep(s[0]);
}
template <class V>
[[gnu::always_inline]] inline void copy_loop(char* to, const char* from, int64_t bytes) {
  constexpr int kUnroll = 4;
  for (int64_t i = 0; i + int64_t(sizeof(V)) * kUnroll <= bytes; i += int64_t(sizeof(V)) * kUnroll)
#pragma GCC unroll 4
    for (int k = 0; k < kUnroll; ++k) {
      int64_t at = i + int64_t(sizeof(V)) * k;
      *reinterpret_cast<V*>(to + at) = *reinterpret_cast<const V*>(from + at);
    }
  keep(*to);
}

using Int128 [[gnu::vector_size(16), gnu::may_alias]] = int64_t;
using Int256 [[gnu::vector_size(32), gnu::may_alias]] = int64_t;
using Int512 [[gnu::vector_size(64), gnu::may_alias]] = int64_t;

void read_base(char*, const char* from, int64_t n) { read_loop<Int128>(from, n); }
void copy_base(char* to, const char* from, int64_t n) { copy_loop<Int128>(to, from, n); }
#ifdef __x86_64__
[[gnu::target("avx2")]] void read_v3(char*, const char* from, int64_t n) {
  read_loop<Int256>(from, n);
}
[[gnu::target("avx2")]] void copy_v3(char* to, const char* from, int64_t n) {
  copy_loop<Int256>(to, from, n);
}
[[gnu::target("avx512f")]] void read_v4(char*, const char* from, int64_t n) {
  read_loop<Int512>(from, n);
}
[[gnu::target("avx512f")]] void copy_v4(char* to, const char* from, int64_t n) {
  copy_loop<Int512>(to, from, n);
}
void stream_base(char* to, const char* from, int64_t n) {
  for (int64_t i = 0; i + 64 <= n; i += 64)
    for (int64_t k = 0; k < 64; k += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + k),
                       *reinterpret_cast<const __m128i*>(from + i + k));
}
[[gnu::target("avx512f")]] void stream_v4(char* to, const char* from, int64_t n) {
  for (int64_t i = 0; i + 64 <= n; i += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(from + i));
}
#endif

using MemoryLoop = void (*)(char*, const char*, int64_t);
MemoryLoop memory_loop(Traffic traffic) {
#ifdef __x86_64__
  if (traffic == Traffic::kStreamingCopy)
    return cpu::current_isa() == cpu::Isa::kV4 ? stream_v4 : stream_base;
  if (cpu::current_isa() == cpu::Isa::kV4) return traffic == Traffic::kRead ? read_v4 : copy_v4;
  if (cpu::current_isa() == cpu::Isa::kV3) return traffic == Traffic::kRead ? read_v3 : copy_v3;
#endif
  return traffic == Traffic::kRead ? read_base : copy_base;
}
// Waits until streamed lines are visible to other threads.
void finish(Traffic traffic) {
#ifdef __x86_64__
  if (traffic == Traffic::kStreamingCopy) _mm_sfence();
#endif
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

double measure_bandwidth(Traffic traffic, int64_t bytes) {
  constexpr int64_t kTrafficPerTry = int64_t(64) << 20;
  MemoryLoop loop = memory_loop(traffic);
  int64_t n = (traffic == Traffic::kRead ? bytes : bytes / 2) / 512 * 512;
  Tensor from = empty({bytes}, kU8), to = traffic == Traffic::kRead ? from : empty({n}, kU8);
  std::memset(from.raw(), 1, size_t(bytes));
  std::memset(to.raw(), 1, size_t(n));
  char *target = static_cast<char*>(to.raw()), *source = static_cast<char*>(from.raw());
  int64_t rounds = std::max<int64_t>(1, kTrafficPerTry / bytes);
  double best = 0;
  for (int i = 0; i < kTries; ++i) {
    Stopwatch w;
    for (int64_t r = 0; r < rounds; ++r) loop(target, source, n), finish(traffic);
    best = std::max(best, double(n * rounds) * (traffic == Traffic::kRead ? 1 : 2) / w.seconds());
  }
  return best;
}

void copy_memory(Traffic traffic, char* to, const char* from, int64_t n) {
  memory_loop(traffic)(to, from, n);
  finish(traffic);
}

void move_memory(Traffic traffic, char* to, int64_t written, const char* from, int64_t read) {
  constexpr int64_t kPiece = 64 << 10, kStep = 512;  // of the widest loop
  const MemoryLoop copy = memory_loop(traffic), only_read = memory_loop(Traffic::kRead);
  const bool mixed = read != written && read > 0 && written >= kStep;
  const int64_t pieces = mixed ? std::max<int64_t>(1, std::max(read, written) / kPiece) : 1;
  auto part = [&](int64_t bytes, int64_t k) { return bytes * k / pieces / kStep * kStep; };
  for (int64_t k = 0; k < pieces; ++k) {
    const int64_t r = part(read, k), w = part(written, k);
    const int64_t reads = part(read, k + 1) - r, writes = part(written, k + 1) - w;
    const int64_t both = std::min(reads, writes);
    copy(to + w, from + r, both);
    // Lines that are only written repeat the lines just read, or the first ones.
    for (int64_t at = both; at < writes; at += kStep)
      copy(to + w + at, both > 0 ? from + r : from, kStep);
    if (reads > both) only_read(nullptr, from + r + both, reads - both);
  }
  finish(traffic);
}

std::vector<Level> memory_levels(int cores) {
  std::vector<Level> levels;
  for (int i = 0; i < 8; ++i) {
    std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/", type,
                size, shared;
    int number = 0;
    std::ifstream(folder + "type") >> type;
    std::ifstream(folder + "level") >> number;
    std::ifstream(folder + "size") >> size;
    std::ifstream(folder + "shared_cpu_list") >> shared;
    if (size.empty() || type == "Instruction") continue;
    int64_t bytes = std::stoll(size) * (size.back() == 'M' ? 1 << 20 : 1024);
    bool several = shared.find_first_of(",-") != std::string::npos;
    levels.push_back({"L" + std::to_string(number), bytes, bytes / 2 / (several ? cores : 1)});
  }
  int64_t last = levels.empty() ? int64_t(32) << 20 : levels.back().size;
  levels.push_back({"DRAM", 0, std::max<int64_t>(int64_t(256) << 20, last * 4)});
  return levels;
}

}  // namespace tessera::bench
