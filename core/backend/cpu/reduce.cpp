// Reductions, bits_hash, cat and unslice: geometry here, loops in kernels/reduce.cpp. Runs of
// adjacent reduced dims are reduced one after the other, the innermost first, each as [outer, n,
// inner].
#include <algorithm>
#include <cstring>

#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/base/boundary.h"
#include "core/dispatch/copy.h"
#include "core/ops/dim_attributes.h"
#include "core/ops/reduce_attributes.h"
#include "core/primitive/primitive_of.h"
// Each text needs the one before it.
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/bits_hash.h"
// clang-format on

namespace tessera::cpu {
namespace {

constexpr int64_t kGrain = 32768;
constexpr int64_t kPiece = limit("reduce.piece");  // of a whole-tensor sum that one task reduces

// The extents that kernels/reduce.cpp cuts.
void meet_loops(int64_t n, int64_t inner) {
  if (inner == 1)
    meet("reduce.lanes", n), meet("reduce.block", n);
  else
    meet("reduce.run", n), meet("reduce.columns", inner);
}

// A whole tensor of several pieces; `again` reduces what fn makes of them.
template <class In, class T, class Fn, class Again>
void reduce_whole(Fn fn, Again again, const In* x, T* out, int64_t n) {
  const int64_t pieces = (n + kPiece - 1) / kPiece;
  Tensor partial = empty({pieces}, dtype_of<T>);
  T* p = partial.data<T>();
  parallel_for("reduce.pieces", pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      fn(x + i * kPiece, p + i, std::min(kPiece, n - i * kPiece), 1, 0, 1);
  });
  again(p, out, pieces, 1, 0, 1);
}

template <class In, class T, class Fn, class Again>
void reduce_pieces(Fn fn, Again again, const In* x, T* out, int64_t outer, int64_t n,
                   int64_t inner) {
  meet_loops(n, inner);
  if (outer == 1 && inner == 1) {
    meet("reduce.piece", n);
    if (n > kPiece) return reduce_whole(fn, again, x, out, n);
    meet_threads("reduce.pieces", 1, 1);
    return fn(x, out, n, 1, 0, 1);
  }
  parallel_for("reduce.threads", outer,
               std::max<int64_t>(1, kGrain / std::max<int64_t>(1, n * inner)),
               [&](int64_t begin, int64_t end) { fn(x, out, n, inner, begin, end); });
}

void reduce_run(ReduceKind kind, const Tensor& x, const Tensor& out, int64_t outer, int64_t n,
                int64_t inner) {
  const ReduceTable& t = simd<ReduceTable>();
  auto run = [&](auto fn, const auto* from, auto* to) {
    reduce_pieces(fn, fn, from, to, outer, n, inner);
  };
  switch (x.dtype()) {
    case kBF16:
      return reduce_pieces(t.sum_bf16, t.f32[int(kind)],
                           static_cast<const uint16_t*>(x.raw_values()), out.data<float>(), outer,
                           n, inner);
    case kF32: return run(t.f32[int(kind)], x.values<float>(), out.data<float>());
    case kF64: return run(t.f64[int(kind)], x.values<double>(), out.data<double>());
    default: return run(t.i64[int(kind)], x.values<int64_t>(), out.data<int64_t>());
  }
}

void plan_dense(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.dense_in = 1;
}

void run_reduce(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                Workspace, const Stream&) {
  const auto& a = attributes_of<ReduceAttributes>(prim);
  DType compute = compute_dtype(in[0].dtype());
  const bool as_is = in[0].dtype() == kBF16 && a.kind == ReduceKind::kSum;
  Tensor x = as_is ? in[0] : converted(in[0], compute);
  Shape shape = x.shape();
  for (int d = shape.size() - 1; d >= 0;) {
    if (!(a.mask >> d & 1)) {
      --d;
      continue;
    }
    int first = d;
    while (first > 0 && a.mask >> (first - 1) & 1) --first;
    int64_t outer = 1, n = 1, inner = 1;
    for (int i = 0; i < first; ++i) outer *= shape[i];
    for (int i = first; i <= d; ++i) n *= shape[i], shape[i] = 1;
    for (int i = d + 1; i < shape.size(); ++i) inner *= shape[i];
    bool last = (a.mask & ((1u << first) - 1)) == 0 && out[0].dtype() == compute;
    Tensor next = last ? out[0] : empty(shape, compute, x.device());
    reduce_run(a.kind, x, next, outer, n, inner);
    x = next;
    d = first - 1;
  }
  if (x.raw_values() != out[0].raw()) convert_into(x, out[0]);
}

// Dense parts with short rows, row after row, so that the result is written once from front to
// back.
void cat_rows(std::span<const Tensor> in, const Tensor& out, int64_t rows) {
  const size_t row_bytes = out.nbytes() / size_t(rows);
  const int64_t grain = std::max<int64_t>(1, kGrain * rows / out.numel());
  parallel_for("cat.threads", rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      char* to = static_cast<char*>(out.raw()) + size_t(r) * row_bytes;
      for (const Tensor& t : in) {
        const size_t bytes = t.nbytes() / size_t(rows);
        std::memcpy(to, static_cast<const char*>(t.raw_values()) + size_t(r) * bytes, bytes);
        to += bytes;
      }
    }
  });
}

void run_bits_hash(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out,
                   Workspace, const Stream&) {
  const uint64_t bytes = in[0].nbytes(), words = bytes / 8;
  const auto* data = static_cast<const char*>(in[0].raw_values());
  fn::BitsHash hash;
  for (uint64_t i = 0; i < words; ++i) {
    uint64_t word;
    std::memcpy(&word, data + 8 * i, 8);
    fn::add_word(hash, word, i);
  }
  if (bytes % 8) fn::add_word(hash, fn::word_of<unsigned char>(data, words, bytes), words);
  fn::add_word(hash, bytes, (bytes + 7) / 8);
  out[0].data<int64_t>()[0] = int64_t(hash.first), out[0].data<int64_t>()[1] = int64_t(hash.second);
}

void run_cat(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
             Workspace, const Stream&) {
  int dim = attributes_of<CatAttributes>(prim).dim;
  if (out[0].numel() == 0) return;
  auto dense = [](const Tensor& t) { return t.is_contiguous() && t.numel() > 0; };
  int64_t rows = 1, at = 0;
  for (int d = 0; d < dim; ++d) rows *= out[0].shape()[d];
  meet("cat.row", out[0].numel() / rows);
  if (out[0].numel() / rows <= limit("cat.row") && dense(out[0]) &&
      std::all_of(in.begin(), in.end(), dense))
    return cat_rows(in, out[0], rows);
  for (const Tensor& t : in) {
    Tensor window({t.shape(), out[0].strides(), t.dtype(), t.device()}, out[0].storage(),
                  out[0].offset() + at * out[0].strides()[dim]);
    copy_values(window, t);
    at += t.shape()[dim];
  }
}

void run_unslice(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                 Workspace, const Stream&) {
  const auto& a = attributes_of<UnsliceAttributes>(prim);
  std::fill_n(static_cast<char*>(out[0].raw()), out[0].nbytes(), char(0));
  Strides st = out[0].strides();
  int64_t offset = out[0].offset() + a.begin * st[a.dim];
  st[a.dim] *= a.step;
  copy_values(Tensor({in[0].shape(), st, in[0].dtype(), in[0].device()}, out[0].storage(), offset),
              in[0]);
}

}  // namespace

void register_reduce(KernelTable& t) {
  for (int kind = 0; kind <= int(ReduceKind::kAll); ++kind)
    t.add(DeviceKind::kCPU, name_of(ReduceKind(kind)), {plan_dense, run_reduce});
  t.add(DeviceKind::kCPU, "bits_hash", {plan_dense, run_bits_hash});
  t.add(DeviceKind::kCPU, "cat", {nullptr, run_cat});
  t.add(DeviceKind::kCPU, "unslice", {nullptr, run_unslice});
}

}  // namespace tessera::cpu
