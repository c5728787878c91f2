// Random tensors and dropout on the CPU. The key (seed, number) names a stream of its own; an
// element draws from it at its global index, or at (sample number, element in the sample).
#include <algorithm>
#include <bit>
#include <cmath>

#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/base/boundary.h"
#include "core/ops/create_attributes.h"
#include "core/primitive/primitive_of.h"
#include "core/tensor/element.h"
#include "core/tensor/philox.h"

namespace tessera::cpu {
namespace {

using In = std::span<const Tensor>;
using Out = std::span<const Tensor>;
constexpr int64_t kChunk = limit("random.chunk");  // elements drawn at a time, a multiple of 4

// Calls run(global index of the first, local offset, count) for every run of elements that are
// neighbours in both.
template <class F>
void for_runs(const Shape& local, const Dims& begin, const Shape& global, F run) {
  int64_t total = numel(local);
  if (total == 0) return;
  if (global.empty() || local == global)
    return parallel_for("random.threads", total, 1 << 14,
                        [&](int64_t b, int64_t e) { run(b, b, e - b); });
  int64_t n = local.back(), rows = total / n;
  parallel_for("random.row_threads", rows, std::max<int64_t>(1, (1 << 14) / n),
               [&](int64_t b, int64_t e) {
                 for (int64_t r = b; r < e; ++r) {
                   int64_t rest = r, index = 0, step = global.back();
                   for (int d = local.size() - 2; d >= 0; --d) {
                     index += (rest % local[d] + begin[d]) * step;
                     rest /= local[d];
                     step *= global[d];
                   }
                   run(index + begin[local.size() - 1], r * n, n);
                 }
               });
}

// Calls use(words, first, count): words of elements [first, first + count) of the stream, one word
// each.
template <class F>
void for_words(uint64_t key, uint64_t hi, int64_t first, int64_t count, F use) {
  uint32_t words[kChunk + 8];
  meet("random.chunk", count);
  for (int64_t at = 0; at < count; at += kChunk) {
    int64_t n = std::min(kChunk, count - at), block = (first + at) / 4, skip = (first + at) % 4;
    simd<RandomTable>().words(key, hi, uint64_t(block), (skip + n + 3) / 4, words);
    use(words + skip, at, n);
  }
}

uint64_t stream_of(const Tensor& key) {
  const int64_t* k = key.values<int64_t>();
  return stream_key(uint64_t(k[0]), uint64_t(k[1]));
}

void uniform_f32(uint64_t key, int64_t index, float* out, int64_t count) {
  for_words(key, 0, index, count, [&](const uint32_t* w, int64_t at, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[at + i] = uniform_float(w[i]);
  });
}

// Leaves the bits that `dtype`, bf16 or f16, keeps: rounding to nearest would turn numbers just
// below 1 into 1.
void truncate_to(DType dtype, float* x, int64_t count) {
  uint32_t kept = dtype == kBF16 ? 0xffff0000u : 0xffffe000u;
  for (int64_t i = 0; i < count; ++i)
    x[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(x[i]) & kept);
}

// f64 draws two words an element.
void real_f64(RandomKind kind, uint64_t key, int64_t index, double* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint64_t e = uint64_t(index + i);
    if (kind == RandomKind::kUniform) {
      Philox4 p = philox4x32(key, 1, e / 2);
      uint64_t bits = uint64_t(p.v[2 * (e % 2) + 1]) << 32 | p.v[2 * (e % 2)];
      out[i] = double(bits >> 11) * 0x1p-53;
    } else {
      Philox4 p = philox4x32(key, 2, e / 2);
      double u = (double((uint64_t(p.v[1]) << 32 | p.v[0]) >> 11) + 1) * 0x1p-53,
             angle = double((uint64_t(p.v[3]) << 32 | p.v[2]) >> 11) * (0x1p-53 * 2 * M_PI);
      out[i] = std::sqrt(-2 * std::log(u)) * (e % 2 ? std::sin(angle) : std::cos(angle));
    }
  }
}

void normal_f32(uint64_t key, int64_t index, float* out, int64_t count) {
  float pairs[kChunk + 8];
  int64_t skip =
      index %
      2;  // pairs begin at even elements: elements 2 p and 2 p + 1 draw words 2 p and 2 p + 1
  for (int64_t at = -skip; at < count; at += kChunk) {
    int64_t n = std::min(kChunk, (count - at + 1) & ~int64_t(1));
    for_words(key, 3, index + at, n, [&](const uint32_t* w, int64_t from, int64_t m) {
      simd<RandomTable>().normals(w, pairs + from, m / 2);
    });
    for (int64_t i = std::max<int64_t>(0, -at); i < n && at + i < count; ++i)
      out[at + i] = pairs[i];
  }
}

void run_random(const Primitive& prim, In in, Out out, Workspace, const Stream&) {
  const auto& a = attributes_of<RandomAttributes>(prim);
  uint64_t key = stream_of(in[0]);
  char* p = static_cast<char*>(out[0].raw());
  int64_t size = int64_t(size_of(a.dtype));
  for_runs(a.shape, a.begin, a.global, [&](int64_t index, int64_t at, int64_t count) {
    if (a.kind == RandomKind::kInteger) {
      uint64_t range = uint64_t(a.high - a.low);
      // The high half of a 64-bit draw times the range (Lemire 2019, without rejection): bias below
      // range / 2^64.
      for (int64_t i = 0; i < count; ++i) {
        uint64_t bits = low64(philox4x32(key, 4, uint64_t(index + i)));
        write_integer(p + (at + i) * size, a.dtype,
                      a.low + int64_t((unsigned __int128)(bits)*range >> 64));
      }
    } else if (a.dtype == kF64) {
      real_f64(a.kind, key, index, reinterpret_cast<double*>(p) + at, count);
    } else {
      float buffer[kChunk];
      for (int64_t i = 0; i < count; i += kChunk) {
        int64_t n = std::min(kChunk, count - i);
        float* to = a.dtype == kF32 ? reinterpret_cast<float*>(p) + at + i : buffer;
        (a.kind == RandomKind::kUniform ? uniform_f32 : normal_f32)(key, index + i, to, n);
        if (a.dtype == kF32) continue;
        if (a.kind == RandomKind::kUniform) truncate_to(a.dtype, to, n);
        convert_loop(kF32, a.dtype)(p + (at + i) * size, size, reinterpret_cast<const char*>(to), 4,
                                    n);
      }
    }
  });
}

template <class T>
void drop(uint64_t key, uint64_t hi, int64_t index, const T* x, T* y, int64_t count,
          uint32_t threshold, T scale) {
  for_words(key, hi, index, count, [&](const uint32_t* w, int64_t at, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[at + i] = w[i] < threshold ? T(0) : x[at + i] * scale;
  });
}

template <class T>
void run_dropout_as(const DropoutAttributes& a, In in, const Tensor& x, const Tensor& y) {
  uint64_t key = stream_of(in[1]);
  uint32_t threshold = a.threshold();
  const T scale = T(a.kept());
  const T* from = x.values<T>();
  T* to = y.data<T>();
  if (!a.by_sample)
    return for_runs(x.shape(), a.begin, a.global, [&](int64_t index, int64_t at, int64_t count) {
      drop(key, ~uint64_t(0), index, from + at, to + at, count, threshold, scale);
    });
  if (x.numel() == 0) return;
  const int64_t* samples = in[2].values<int64_t>();
  int64_t batch = in[2].numel(), each = x.numel() / batch;
  // Within a sample the element is indexed by its global place; dim 0 is what numbers the samples.
  Shape local = x.shape(), global = a.global.empty() ? local : a.global;
  Dims begin = a.begin.empty() ? Dims::filled(local.size(), 0) : a.begin;
  local[0] /= batch, global[0] = local[0], begin[0] = 0;
  parallel_for("dropout.sample_threads", batch,
               std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(each, 1)),
               [&](int64_t b, int64_t e) {
                 for (int64_t s = b; s < e; ++s)
                   for_runs(local, begin, global, [&](int64_t index, int64_t at, int64_t count) {
                     drop(key, uint64_t(samples[s]), index, from + s * each + at,
                          to + s * each + at, count, threshold, scale);
                   });
               });
}

void run_dropout(const Primitive& prim, In in, Out out, Workspace, const Stream&) {
  const auto& a = attributes_of<DropoutAttributes>(prim);
  DType t = in[0].dtype();
  if (t == kF32) return run_dropout_as<float>(a, in, in[0], out[0]);
  if (t == kF64) return run_dropout_as<double>(a, in, in[0], out[0]);
  through_f32(in, out, t, [&](In i, Out o) { run_dropout_as<float>(a, i, i[0], o[0]); });
}

void plan_dense(const Primitive&, In, std::span<Meta>, Plan& plan) {
  plan.all_dense = true;
  plan.in_place = true;
}

}  // namespace

void register_random(KernelTable& t) {
  for (const char* op : {"rand", "randn", "randint"})
    t.add(DeviceKind::kCPU, op, {nullptr, run_random});
  t.add(DeviceKind::kCPU, "dropout", {plan_dense, run_dropout});
}

}  // namespace tessera::cpu
