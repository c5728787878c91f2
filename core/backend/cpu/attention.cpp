// Attention on the CPU: heads are dealt to threads, and each thread runs the tiled kernel of
// kernels/attention.cpp. Results take the operands' order of dims, so that merging heads again is a
// view.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/base/boundary.h"
#include "core/dispatch/copy.h"
#include "core/ops/fused_attributes.h"
#include "core/primitive/primitive_of.h"
#include "core/tensor/philox.h"

namespace tessera::cpu {
namespace {

static_assert(kLeastMask == AttentionAttributes::kLeastMask);

using In = std::span<const Tensor>;
using Out = std::span<const Tensor>;

// What sums of T, as it lies in memory, are kept in. bf16 is its bits.
template <class T>
using SumOf = std::conditional_t<std::is_same_v<T, uint16_t>, float, T>;

template <class T>
const AttentionFns<T, SumOf<T>>& fns() {
  if constexpr (std::is_same_v<T, uint16_t>)
    return simd<AttentionBf16Fns>();
  else if constexpr (std::is_same_v<T, float>)
    return simd<AttentionTable>().f32;
  else
    return simd<AttentionTable>().f64;
}

void plan_forward(const Primitive& prim, In in, std::span<Meta> out, Plan& plan) {
  lie_as_heads(in[0].meta(), out[0]);
  plan.dense_in = attributes_of<AttentionAttributes>(prim).dense_draw(in.size());
}
void plan_backward(const Primitive& prim, In in, std::span<Meta> out, Plan& plan) {
  for (int i = 0; i < 3; ++i) lie_as_heads(in[size_t(i + 1)].meta(), out[size_t(i)]);
  plan.dense_in = 1u << 5 | attributes_of<AttentionAttributes>(prim).dense_draw(in.size());  // lse
  plan.any_strides_out = true;
}

// Elements of a row must be neighbours.
Tensor dense_rows(const Tensor& t) {
  return t.strides().back() == 1 || t.size(-1) == 1 ? t : dense_copy(t);
}

// Where head (b, h) of a [B, H, ..] tensor begins: of an operand, of a result.
template <class T>
const T* head(const Tensor& t, int64_t b, int64_t h) {
  return static_cast<const T*>(t.raw_values()) + b * t.strides()[0] + h * t.strides()[1];
}
template <class T>
T* out_head(const Tensor& t, int64_t b, int64_t h) {
  return static_cast<T*>(t.raw()) + b * t.strides()[0] + h * t.strides()[1];
}

// The further operands of a call: a mask, in floats of the dtype `sums` or as bools, and what draws
// the weights that are dropped.
struct Further {
  Tensor values, samples;
  int64_t step[4] = {};  // elements of the mask between batches, heads, queries and keys
  DrawnWeights drawn;
  Further(const AttentionAttributes& a, In in, DType sums, AttentionHead& h, int64_t batch,
          int64_t heads) {
    const AttentionFurther more(a, in);
    if (a.has_mask) {
      values = more.mask.dtype() == kBool ? more.mask : converted(more.mask, sums);
      for (int d = 0; d < 4; ++d) step[d] = values.size(d) == 1 ? 0 : values.strides()[d];
      h.mask_row = step[2], h.mask_column = step[3];
    }
    if (!a.drops()) return;
    samples = more.samples;
    drawn = DrawnWeights(a.drop, {batch, heads, h.t, h.s}, samples.defined() ? samples.numel() : 0);
    const int64_t* key = more.key.values<int64_t>();
    h.draw_key = stream_key(uint64_t(key[0]), uint64_t(key[1])), h.draw_row = drawn.query;
    h.drops = true, h.threshold = a.drop.threshold(), h.kept = a.drop.kept();
  }
  // Adds the part of head (b, h) to what it reads.
  template <class T, class Sum>
  AttentionIn<T, Sum> with(AttentionIn<T, Sum> in, int64_t b, int64_t h) const {
    in.draw_hi =
        samples.defined() ? uint64_t(samples.values<int64_t>()[b / drawn.rows]) : ~uint64_t(0);
    in.draw_first = drawn.first(b, h);
    if (!values.defined()) return in;
    const int64_t at = b * step[0] + h * step[1];
    if (values.dtype() == kBool)
      in.sees = static_cast<const bool*>(values.raw_values()) + at;
    else
      in.adds = static_cast<const Sum*>(values.raw_values()) + at;
    return in;
  }
};

// The extents that the kernels cut into tiles.
template <class T>
void meet_tiles(const AttentionHead& h, bool back) {
  if constexpr (!std::is_same_v<T, uint16_t>) {
    meet("attention.rows", h.t), meet("attention.columns", h.s), meet("attention.lanes", h.s);
  } else if (back) {
    meet("attention_bf16.rows_backward", h.t), meet("attention_bf16.columns_backward", h.s);
  } else {
    meet("attention_bf16.rows", h.t), meet("attention_bf16.columns", h.s);
  }
}

template <class T>
using HeadIn = AttentionIn<T, SumOf<T>>;

// run(what head (b, h) reads, what the next one reads, b, h, scratch) for every head of q [B, H,
// ..].
template <class T, class Reads, class Run>
void for_each_head(const AttentionHead& shape, const Tensor& q, const Reads& reads,
                   const Run& run) {
  const int64_t heads = q.size(1), work = fns<T>().workspace(shape);
  parallel_for("attention.heads", q.size(0) * heads, 1, [&](int64_t begin, int64_t end) {
    Tensor scratch = empty({work}, dtype_of<SumOf<T>>);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t next = std::min(i + 1, end - 1);
      run(reads(i / heads, i % heads), reads(next / heads, next % heads), i / heads, i % heads,
          scratch.data<SumOf<T>>());
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
  const Further further(a, in, dtype_of<SumOf<T>>, head_shape, q.size(0), q.size(1));
  meet_tiles<T>(head_shape, false);
  for_each_head<T>(
      head_shape, q,
      [&](int64_t b, int64_t h) {
        return further.with(HeadIn<T>{head<T>(q, b, h), head<T>(k, b, h), head<T>(v, b, h)}, b, h);
      },
      [&](const HeadIn<T>& in, const HeadIn<T>& next, int64_t b, int64_t h, SumOf<T>* scratch) {
        fns<T>().forward(head_shape, in, next, out_head<T>(o, b, h), out_head<SumOf<T>>(lse, b, h),
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
  const Further further(a, in, dtype_of<SumOf<T>>, head_shape, q.size(0), q.size(1));
  meet_tiles<T>(head_shape, true);
  for_each_head<T>(
      head_shape, q,
      [&](int64_t b, int64_t h) {
        return further.with(
            HeadIn<T>{head<T>(q, b, h), head<T>(k, b, h), head<T>(v, b, h), head<T>(g, b, h),
                      head<T>(o, b, h), head<SumOf<T>>(lse, b, h)},
            b, h);
      },
      [&](const HeadIn<T>& in, const HeadIn<T>& next, int64_t b, int64_t h, SumOf<T>* scratch) {
        fns<T>().backward(head_shape, in, next, out_head<T>(dq, b, h), out_head<T>(dk, b, h),
                          out_head<T>(dv, b, h), scratch);
      });
}

// Whether rows of these operands lie in whole pairs of bf16, and the CPU multiplies pairs.
bool fits_pairs(In operands) {
  bool even = has_bf16_dot();
  for (const Tensor& t : operands)
    even &= t.dtype() == kBF16 && t.size(3) % 2 == 0 && (t.size(2) == 1 || t.strides()[2] % 2 == 0);
  return even;
}

// ---- other 16-bit floats: a head at a time is widened to f32, where it stays in a cache.

// The rows of head (b, h) of a [B, H, T, W] tensor.
struct Rows {
  char* first;
  int64_t bytes, count, width, step;  // bytes of an element; elements between rows
  Rows(const Tensor& t, const void* data, int64_t b, int64_t h)
      : first(const_cast<char*>(static_cast<const char*>(data))),
        bytes(int64_t(size_of(t.dtype()))),
        count(t.size(2)),
        width(t.size(3)),
        step(t.strides()[2]) {
    first += (b * t.strides()[0] + h * t.strides()[1]) * bytes;
    if (step == width) width *= count, count = 1;
  }
};
void widen_rows(const Tensor& t, int64_t b, int64_t h, float* to) {
  const Rows r(t, t.raw_values(), b, h);
  const ConvertLoop convert = convert_loop(t.dtype(), kF32);
  for (int64_t i = 0; i < r.count; ++i)
    convert(reinterpret_cast<char*>(to + i * r.width), 4, r.first + i * r.step * r.bytes, r.bytes,
            r.width);
}
void narrow_rows(const float* from, const Tensor& t, int64_t b, int64_t h) {
  const Rows r(t, t.raw(), b, h);
  const ConvertLoop convert = convert_loop(kF32, t.dtype());
  for (int64_t i = 0; i < r.count; ++i)
    convert(r.first + i * r.step * r.bytes, r.bytes,
            reinterpret_cast<const char*>(from + i * r.width), 4, r.width);
}

int64_t head_size(const Tensor& t) { return t.size(2) * t.size(3); }

// compute(b, h, scratch of `elements` floats, scratch of the kernel) for every head of q.
template <class Compute>
void for_each_wide_head(const AttentionHead& shape, const Tensor& q, int64_t elements,
                        const Compute& compute) {
  const int64_t heads = q.size(1), work = fns<float>().workspace(shape);
  parallel_for("attention.wide_heads", q.size(0) * heads, 1, [&](int64_t begin, int64_t end) {
    Tensor wide = empty({elements}), scratch = empty({work});
    for (int64_t i = begin; i < end; ++i)
      compute(i / heads, i % heads, wide.data<float>(), scratch.data<float>());
  });
}

AttentionHead dense_head(const AttentionAttributes& a, const Tensor& q, const Tensor& v) {
  const int64_t d = q.size(3), e = v.size(3);
  return {q.size(2), v.size(2), d, e, a.scale, a.causal, d, d, e, e, e, d, d, e};
}

void forward_16(const AttentionAttributes& a, In in, Out out) {
  const Tensor q = dense_rows(in[0]), k = dense_rows(in[1]), v = dense_rows(in[2]);
  AttentionHead shape = dense_head(a, q, v);
  const Further further(a, in, kF32, shape, q.size(0), q.size(1));
  const int64_t elements = head_size(q) + head_size(k) + head_size(v) + head_size(out[0]);
  for_each_wide_head(shape, q, elements, [&](int64_t b, int64_t h, float* wide, float* scratch) {
    float *wq = wide, *wk = wq + head_size(q), *wv = wk + head_size(k), *wo = wv + head_size(v);
    widen_rows(q, b, h, wq), widen_rows(k, b, h, wk), widen_rows(v, b, h, wv);
    const AttentionIn<float> head = further.with(AttentionIn<float>{wq, wk, wv}, b, h);
    fns<float>().forward(shape, head, head, wo, out_head<float>(out[1], b, h), scratch);
    narrow_rows(wo, out[0], b, h);
  });
}

void backward_16(const AttentionAttributes& a, In in, Out out) {
  const Tensor lse = converted(in[5], kF32);
  Tensors from;  // g, q, k, v, out
  int64_t elements = 0;
  for (int i = 0; i < 5; ++i)
    from.push_back(dense_rows(in[size_t(i)])), elements += head_size(from.back());
  for (const Tensor& t : out) elements += head_size(t);
  const Tensor& q = from[1];
  AttentionHead shape = dense_head(a, q, from[3]);
  const Further further(a, in, kF32, shape, q.size(0), q.size(1));
  for_each_wide_head(shape, q, elements, [&](int64_t b, int64_t h, float* wide, float* scratch) {
    float* at[8];
    for (size_t i = 0; i < 8; ++i) {
      const Tensor& t = i < 5 ? from[i] : out[i - 5];
      at[i] = wide, wide += head_size(t);
      if (i < 5) widen_rows(t, b, h, at[i]);
    }
    const AttentionIn<float> reads = further.with(
        AttentionIn<float>{at[1], at[2], at[3], at[0], at[4], head<float>(lse, b, h)}, b, h);
    fns<float>().backward(shape, reads, reads, at[5], at[6], at[7], scratch);
    for (size_t i = 0; i < 3; ++i) narrow_rows(at[5 + i], out[i], b, h);
  });
}

void run_forward(const Primitive& prim, In in, Out out, Workspace, const Stream&) {
  const auto& a = attributes_of<AttentionAttributes>(prim);
  if (in[0].dtype() == kF64) return forward<double>(a, in, out);
  if (in[0].dtype() == kF32) return forward<float>(a, in, out);
  if (fits_pairs(in.first(3))) return forward<uint16_t>(a, in, out);
  forward_16(a, in, out);
}

void run_backward(const Primitive& prim, In in, Out out, Workspace, const Stream&) {
  const auto& a = attributes_of<AttentionAttributes>(prim);
  if (in[1].dtype() == kF64) return backward<double>(a, in, out);
  if (in[1].dtype() == kF32) return backward<float>(a, in, out);
  if (fits_pairs(in.first(4))) return backward<uint16_t>(a, in, out);
  backward_16(a, in, out);
}

}  // namespace

void register_attention(KernelTable& t) {
  t.add(DeviceKind::kCPU, "attention", {plan_forward, run_forward});
  t.add(DeviceKind::kCPU, "attention_grad", {plan_backward, run_backward});
}

}  // namespace tessera::cpu
