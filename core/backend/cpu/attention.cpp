// Attention on the CPU: heads are dealt to threads, each runs the tiled kernel of
// kernels/attention.cpp. Results take the operands' order of dims, so that merging heads again is a
// view.
#include <algorithm>
#include <vector>

#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/base/parallel.h"
#include "core/dispatch/copy.h"
#include "core/ops/attributes.h"

namespace tessera::cpu {
namespace {

using In = std::span<const Tensor>;
using Out = std::span<const Tensor>;

template <class T>
const AttentionFns<T>& fns() {
  if constexpr (sizeof(T) == 4)
    return simd<AttentionTable>().f32;
  else
    return simd<AttentionTable>().f64;
}

// [B, H, T, D] laid out as [B, T, H, D] where `like` has its heads inside its positions.
void heads_inside(const Tensor& like, Meta& out) {
  const Shape& s = out.shape;
  if (s.size() == 4 && like.strides()[1] < like.strides()[2])
    out.strides = {s[1] * s[2] * s[3], s[3], s[1] * s[3], 1};
}

void plan_forward(const Primitive&, In in, std::span<Meta> out, Plan&) {
  heads_inside(in[0], out[0]);
}
void plan_backward(const Primitive&, In in, std::span<Meta> out, Plan& plan) {
  for (int i = 0; i < 3; ++i) heads_inside(in[size_t(i + 1)], out[size_t(i)]);
  plan.dense_in = 1u << 5;  // lse
  plan.any_strides_out = true;
}

// Elements of a row must be neighbours.
Tensor dense_rows(const Tensor& t) {
  return t.strides().back() == 1 || t.size(-1) == 1 ? t : dense_copy(t);
}

// Where head (b, h) of a [B, H, ..] tensor begins: of an operand, of a result.
template <class T>
const T* head(const Tensor& t, int64_t b, int64_t h) {
  return t.values<T>() + b * t.strides()[0] + h * t.strides()[1];
}
template <class T>
T* out_head(const Tensor& t, int64_t b, int64_t h) {
  return t.data<T>() + b * t.strides()[0] + h * t.strides()[1];
}

// run(what head (b, h) reads, what the next one reads, b, h, scratch) for every head of q [B, H,
// ..].
template <class T, class Reads, class Run>
void for_each_head(const AttentionHead& shape, const Tensor& q, const Reads& reads,
                   const Run& run) {
  const int64_t heads = q.size(1), work = fns<T>().workspace(shape);
  parallel_for(q.size(0) * heads, 1, [&](int64_t begin, int64_t end) {
    Tensor scratch = empty({work}, dtype_of<T>);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t next = std::min(i + 1, end - 1);
      run(reads(i / heads, i % heads), reads(next / heads, next % heads), i / heads, i % heads,
          scratch.data<T>());
    }
  });
}

template <class T>
void forward(const AttentionAttributes& a, In in, Out out) {
  const Tensor q = dense_rows(in[0]), k = dense_rows(in[1]), v = dense_rows(in[2]);
  const Tensor &o = out[0], &lse = out[1];
  AttentionHead head_shape{
      q.size(2),      k.size(2),      q.size(3),      v.size(3), a.scale, a.causal, q.strides()[2],
      k.strides()[2], v.strides()[2], o.strides()[2], 0,         0,       0,        0};
  for_each_head<T>(
      head_shape, q,
      [&](int64_t b, int64_t h) {
        return AttentionIn<T>{head<T>(q, b, h), head<T>(k, b, h), head<T>(v, b, h)};
      },
      [&](const AttentionIn<T>& in, const AttentionIn<T>& next, int64_t b, int64_t h, T* scratch) {
        fns<T>().forward(head_shape, in, next, out_head<T>(o, b, h), out_head<T>(lse, b, h),
                         scratch);
      });
}

template <class T>
void backward(const AttentionAttributes& a, In in, Out out) {
  const Tensor g = dense_rows(in[0]), q = dense_rows(in[1]), k = dense_rows(in[2]),
               v = dense_rows(in[3]), o = dense_rows(in[4]);
  const Tensor &lse = in[5], &dq = out[0], &dk = out[1], &dv = out[2];
  AttentionHead head_shape{q.size(2),       k.size(2),      q.size(3),      v.size(3),
                           a.scale,         a.causal,       q.strides()[2], k.strides()[2],
                           v.strides()[2],  o.strides()[2], g.strides()[2], dq.strides()[2],
                           dk.strides()[2], dv.strides()[2]};
  for_each_head<T>(
      head_shape, q,
      [&](int64_t b, int64_t h) {
        return AttentionIn<T>{head<T>(q, b, h), head<T>(k, b, h), head<T>(v, b, h),
                              head<T>(g, b, h), head<T>(o, b, h), head<T>(lse, b, h)};
      },
      [&](const AttentionIn<T>& in, const AttentionIn<T>& next, int64_t b, int64_t h, T* scratch) {
        fns<T>().backward(head_shape, in, next, out_head<T>(dq, b, h), out_head<T>(dk, b, h),
                          out_head<T>(dv, b, h), scratch);
      });
}

// 16-bit floats are computed in f32 around whole tensors.
void run_forward(const Primitive& prim, In in, Out out, Workspace, const Stream&) {
  const auto& a = static_cast<const AttentionAttributes&>(prim);
  if (in[0].dtype() == kF64) return forward<double>(a, in, out);
  if (in[0].dtype() == kF32) return forward<float>(a, in, out);
  through_f32(in, out, in[0].dtype(), [&](In i, Out o) { forward<float>(a, i, o); });
}

void run_backward(const Primitive& prim, In in, Out out, Workspace, const Stream&) {
  const auto& a = static_cast<const AttentionAttributes&>(prim);
  if (in[1].dtype() == kF64) return backward<double>(a, in, out);
  if (in[1].dtype() == kF32) return backward<float>(a, in, out);
  through_f32(in, out, in[1].dtype(), [&](In i, Out o) { backward<float>(a, i, o); });
}

}  // namespace

void register_attention(KernelTable& t) {
  t.add(DeviceKind::kCPU, "attention", {plan_forward, run_forward});
  t.add(DeviceKind::kCPU, "attention_grad", {plan_backward, run_backward});
}

}  // namespace tessera::cpu
