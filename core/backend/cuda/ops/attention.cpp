// Attention by cuDNN, where it is found and can (graphs.h); else in tiles, forward and backward.
// Heads that are wider than the kernels hold are computed op by op, as the op decomposes.
#include "core/backend/cuda/kernels/attention.h"

#include <algorithm>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/ops/draws.h"
#include "core/backend/cuda/ops/graphs.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/pointwise.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/runtime.h"
#include "core/dispatch/context.h"
#include "core/ops/fused_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cuda {
namespace {

static_assert(kLeastMask == AttentionAttributes::kLeastMask);

using In = std::span<const Tensor>;
using Out = std::span<const Tensor>;

// The instance that holds both widths on this card; none where no instance does.
std::optional<AttentionShape> shape_for(const Tensor& q, const Tensor& v, const Stream& stream) {
  return attention_shape(q.dtype(), std::max(q.size(3), v.size(3)),
                         properties(stream.device.index).shared_bytes_per_block);
}

void run_decomposed(const Primitive& prim, In in, Out out, const Stream& stream) {
  EagerScope unrecorded;
  Scoped<LayerMask> below_all_layers(context().enabled, 0);
  const Tensors results = prim.decompose(in);
  for (size_t i = 0; i < out.size(); ++i) convert(results[i], out[i], stream);
}

AttentionOperand operand(const Tensor& t) {
  return {t.device_data(), t.strides()[0], t.strides()[1], t.strides()[2]};
}

// `bit` where kernels may read and write rows of `t` in packs of 8 elements.
unsigned packs_of(const Tensor& t, unsigned bit) {
  constexpr int64_t kPack = 8;
  const auto& s = t.strides();
  const bool aligned = reinterpret_cast<uintptr_t>(t.device_data()) % 16 == 0;
  return aligned && t.size(3) % kPack == 0 && s[0] % kPack == 0 && s[1] % kPack == 0 &&
                 s[2] % kPack == 0
             ? bit
             : 0;
}

AttentionCall call_for(const Primitive& prim, const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto& a = attributes_of<AttentionAttributes>(prim);
  constexpr int64_t kMost = (int64_t(1) << 31) - 64;  // positions are counted by tiles
  TESSERA_CHECK(q.size(2) < kMost && k.size(2) < kMost && q.size(0) * q.size(1) < kMost,
                "{}: {} queries, {} keys and {} heads are more than 31 bits count", prim.name(),
                q.size(2), k.size(2), q.size(0) * q.size(1));
  AttentionCall c{};
  c.q = operand(q), c.k = operand(k), c.v = operand(v);
  c.scale = a.scale, c.causal = a.causal;
  c.heads = int(q.size(1)), c.queries = int(q.size(2)), c.keys = int(k.size(2));
  c.width = int(q.size(3)), c.value_width = int(v.size(3));
  c.packs = packs_of(q, kPacksQ) | packs_of(k, kPacksK) | packs_of(v, kPacksV);
  return c;
}

// The mask as kernels read it, or nothing: bools, or numbers of the type that they compute in.
Tensor mask_of(const Tensor& mask, DType t, const Stream& stream) {
  if (!mask.defined()) return {};
  const DType compute = t == kF64 ? kF64 : kF32;
  if (mask.dtype() == kBool || mask.dtype() == compute) return mask;
  const Tensor wide = empty(mask.shape(), compute, mask.device());
  convert(mask, wide, stream);
  return wide;
}
void set_mask(AttentionCall& c, const Tensor& mask) {
  if (!mask.defined()) return;
  const auto step = [&](int d) { return mask.size(d) == 1 ? 0 : mask.strides()[d]; };
  c.mask = mask.device_data(), c.mask_is_bool = mask.dtype() == kBool;
  c.mask_batch = step(0), c.mask_head = step(1), c.mask_query = step(2), c.mask_key = step(3);
}

// What draws the weights that are dropped.
void set_draw(AttentionCall& c, const AttentionAttributes& a, const AttentionFurther& more,
              int64_t batch) {
  if (!a.drops()) return;
  set_key(c, more.key);
  const int64_t samples = a.drop.by_sample ? more.samples.numel() : 0;
  const DrawnWeights drawn(a.drop, {batch, c.heads, c.queries, c.keys}, samples);
  if (samples) c.samples = static_cast<const long*>(more.samples.device_data());
  c.draw_begin = drawn.begin, c.draw_batch = drawn.batch, c.draw_head = drawn.head;
  c.draw_query = drawn.query, c.draw_rows = int(drawn.rows);
  c.threshold = a.drop.threshold(), c.kept = a.drop.kept();
}

void launch_attention(const char* entry, AttentionEntry kind, DType t, AttentionShape shape,
                      int64_t positions, const Tensor& q, const Stream& stream,
                      const AttentionCall& c) {
  if (q.size(0) * q.size(1) == 0 || positions == 0) return;
  const bool dropped = c.kept > 0;
  launch(attention_instance(t, shape, c.mask, dropped).name, entry,
         attention_geometry(kind, t, shape, q.size(0) * q.size(1), positions, dropped), stream, c);
}

// Heads that no instance holds are computed by other ops.
bool decomposes(const Tensor& q, const Tensor& v) {
  return !attention_shape(q.dtype(), std::max(q.size(3), v.size(3)),
                          properties(q.device().index).shared_bytes_per_block);
}

// Elements of a row are neighbours, or the operand is copied.
uint32_t need_dense(In in) {
  uint32_t bits = 0;
  for (size_t i = 0; i < in.size(); ++i)
    if (in[i].strides().back() != 1 && in[i].size(-1) != 1) bits |= 1u << i;
  return bits;
}

void plan_forward(const Primitive& prim, In in, std::span<Meta> out, Plan& plan) {
  lie_as_heads(in[0].meta(), out[0]);
  plan.dense_in =
      need_dense(in.first(3)) | attributes_of<AttentionAttributes>(prim).dense_draw(in.size());
  plan.uncapturable = decomposes(in[0], in[2]);
}
void plan_backward(const Primitive& prim, In in, std::span<Meta> out, Plan& plan) {
  for (size_t i = 0; i < out.size(); ++i) lie_as_heads(in[i + 1].meta(), out[i]);
  plan.any_strides_out = true;
  plan.dense_in = need_dense(in.first(5)) | 1u << 5 |
                  attributes_of<AttentionAttributes>(prim).dense_draw(in.size());  // lse
  plan.uncapturable = decomposes(in[1], in[3]);
}

void run_forward(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const Tensor &q = in[0], &k = in[1], &v = in[2];
  const auto& a = attributes_of<AttentionAttributes>(prim);
  if (library_attention(a, in, out, stream)) return;
  const std::optional<AttentionShape> shape = shape_for(q, v, stream);
  if (!shape) return run_decomposed(prim, in, out, stream);
  const AttentionFurther more(a, in);
  const Tensor mask = mask_of(more.mask, q.dtype(), stream);
  AttentionCall c = call_for(prim, q, k, v);
  set_mask(c, mask);
  set_draw(c, a, more, q.size(0));
  c.out = operand(out[0]), c.lse = out[1].device_data();
  c.packs |= packs_of(out[0], kPacksOut);
  launch_attention("forward", AttentionEntry::kForward, q.dtype(), *shape, q.size(2), q, stream, c);
}

// Operands g, q, k, v, out, lse and the further ones; results dq, dk, dv.
void run_backward(const Primitive& prim, In in, Out out, Workspace, const Stream& stream) {
  const Tensor &q = in[1], &k = in[2], &v = in[3];
  const auto& a = attributes_of<AttentionAttributes>(prim);
  if (library_attention_grad(a, in, out, stream)) return;
  const std::optional<AttentionShape> shape = shape_for(q, v, stream);
  if (!shape) return run_decomposed(prim, in, out, stream);
  const DType compute = q.dtype() == kF64 ? kF64 : kF32;
  const Tensor delta = empty(in[5].shape(), compute, stream.device);
  const Tensor lse =
      in[5].dtype() == compute ? in[5] : empty(in[5].shape(), compute, stream.device);
  if (!lse.is_same(in[5])) convert(in[5], lse, stream);
  const AttentionFurther more(a, in);
  const Tensor mask = mask_of(more.mask, q.dtype(), stream);
  AttentionCall c = call_for(prim, q, k, v);
  set_mask(c, mask);
  set_draw(c, a, more, q.size(0));
  c.g = operand(in[0]), c.out = operand(in[4]), c.lse = lse.device_data();
  c.dq = operand(out[0]), c.dk = operand(out[1]), c.dv = operand(out[2]);
  c.delta = delta.device_data();
  c.packs |= packs_of(in[0], kPacksG) | packs_of(out[0], kPacksDq) | packs_of(out[1], kPacksDk) |
             packs_of(out[2], kPacksDv);
  const DType t = q.dtype();
  launch_attention("delta", AttentionEntry::kDelta, t, *shape, q.size(2), q, stream, c);
  launch_attention("queries", AttentionEntry::kQueries, t, *shape, q.size(2), q, stream, c);
  launch_attention("keys", AttentionEntry::kKeys, t, *shape, k.size(2), q, stream, c);
}

}  // namespace

void register_attention(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  table.add(cuda, "attention", {.plan = plan_forward, .run = run_forward, .host_scalars = true});
  table.add(cuda, "attention_grad",
            {.plan = plan_backward, .run = run_backward, .host_scalars = true});
}

}  // namespace tessera::cuda
