// Reductions over any dims: runs of reduced dims one after the other, the innermost first, as on
// the CPU. Sums go in the compute type (f32 of 16-bit floats, i64 of integers) until the last is
// written.
#include "core/backend/cuda/ops/reduce.h"

#include <algorithm>

#include "core/backend/cuda/kernels/reduce.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/pointwise.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/runtime.h"
#include "core/ops/reduce_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cuda {
namespace {

DType compute_dtype(DType t) { return t == kF64 ? kF64 : is_floating(t) ? kF32 : kI64; }

void plan_dense(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.dense_in = 1;
}

void run_reduce(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                Workspace, const Stream& stream) {
  const auto& a = attributes_of<ReduceAttributes>(prim);
  reduce_dims(name_of(a.kind), in[0], a.mask, out[0], stream);
}

// The largest number of bytes up to 8 that the address is a multiple of.
int alignment_of(const void* p) {
  const auto at = reinterpret_cast<uintptr_t>(p);
  int bytes = 8;
  while (at % uintptr_t(bytes)) bytes /= 2;
  return bytes;
}

void run_bits_hash(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out,
                   Workspace, const Stream& stream) {
  constexpr int64_t kThreads = 256, kWordsOfAThread = 16, kMostBlocks = 2048;
  BitsHashCall c{};
  c.in = in[0].device_data(), c.bytes = in[0].nbytes(), c.words = (c.bytes + 7) / 8;
  c.parts = unsigned(
      std::clamp<int64_t>(int64_t(c.words) / (kThreads * kWordsOfAThread), 1, kMostBlocks));
  const std::string name = bits_hash_instance(alignment_of(c.in)).name;
  const Tensor parts = empty({c.parts, 2}, kI64, stream.device);
  c.out = static_cast<unsigned long*>(parts.device_data());
  launch(name, "blocks", {{c.parts, 1, 1}, {kThreads, 1, 1}, 0}, stream, c);
  c.in = parts.device_data(), c.out = static_cast<unsigned long*>(out[0].device_data());
  launch(name, "join", {{1, 1, 1}, {kThreads, 1, 1}, 0}, stream, c);
}

}  // namespace

void reduce_dims(std::string_view join, const Tensor& of, uint32_t mask, const Tensor& to,
                 const Stream& stream) {
  Tensor x = of;
  Shape shape = x.shape();
  bool reduced = false;
  for (int d = shape.size() - 1; d >= 0; --d) {
    if (!(mask >> d & 1)) continue;
    int first = d;
    while (first > 0 && mask >> (first - 1) & 1) --first;
    int64_t outer = 1, n = 1, inner = 1;
    for (int i = 0; i < first; ++i) outer *= shape[i];
    for (int i = first; i <= d; ++i) n *= shape[i], shape[i] = 1;
    for (int i = d + 1; i < shape.size(); ++i) inner *= shape[i];
    const bool last = (mask & ((1u << first) - 1)) == 0;
    const Tensor next = last ? to : empty(shape, compute_dtype(of.dtype()), x.device());
    reduce_to(join, x, next, outer, n, inner, stream);
    x = next, d = first, reduced = true;
  }
  if (!reduced) convert(x, to, stream);
}

void reduce_to(std::string_view join, const Tensor& x, const Tensor& to, int64_t outer, int64_t n,
               int64_t inner, const Stream& stream) {
  countable(outer * inner, "the result of a reduction"), countable(n, "an extent");
  const DType partial = compute_dtype(x.dtype());
  const bool aligned = reinterpret_cast<uintptr_t>(x.device_data()) % 16 == 0;
  Tensor from = x;
  for (const ReduceLaunch& l : reduce_launches(outer, n, inner, x.dtype(), partial, aligned)) {
    const bool last = l.call.pieces == 1;
    const Tensor part = last ? to : empty({l.partial}, partial, x.device());
    ReduceCall call = l.call;
    call.in = from.device_data(), call.out = part.device_data();
    launch(reduce_instance(join, from.dtype(), part.dtype()).name, l.entry, l.geometry, stream,
           call);
    from = part;
  }
}

void register_reduce(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  for (int kind = 0; kind <= int(ReduceKind::kAll); ++kind)
    table.add(cuda, name_of(ReduceKind(kind)), {.plan = plan_dense, .run = run_reduce});
  table.add(cuda, "bits_hash", {.plan = plan_dense, .run = run_bits_hash});
}

}  // namespace tessera::cuda
