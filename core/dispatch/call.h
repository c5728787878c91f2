// One call of a kernel, planned: code that the eager backend and the compiler's executor share.
// Invariant: everything here looks at types, layouts and which operands share memory, never at
// values.
// Internal: not part of the public interface.
#pragma once
#include <algorithm>

#include "core/dispatch/other_kernels.h"

namespace tessera {

using MetaPointers = SmallVector<const Meta*, 8>;

inline MetaPointers metas_of(std::span<const Tensor> in) {
  MetaPointers m;
  for (const Tensor& t : in) m.push_back(&t.meta());
  return m;
}

/// The device's kernel, or the one that the op brings along, or what the device has for ops of
/// others; false when there is none.
inline const Kernel& find_kernel(const Primitive& prim, Device device) {
  const Kernel& kernel = kernel_table().find(device.kind, prim.id());
  if (kernel) return kernel;
  if (const Kernel* own = prim.own_kernel(device.kind)) return *own;
  const Kernel* other = other_kernel(device.kind, prim);
  return other ? *other : kernel;
}

/// Where `prim` runs: on the device of its operands, host numbers left out; infer tells the device
/// of a creation.
inline Device device_of(const Primitive& prim, std::span<const Tensor> in) {
  if (in.empty()) return prim.infer({})[0].device;
  for (const Tensor& t : in)
    if (!is_host_number(t.meta())) return t.device();
  return in[0].device();
}

/// What may be on the CPU beside operands on a device: a number, or the key of a draw.
inline bool may_be_on_host(const Primitive& prim, const Meta& t) {
  const bool key = t.device.is_cpu() && prim.draws() && t.dtype == kI64 && t.shape == Shape{2};
  return key || is_host_number(t);
}

struct KernelCall {
  const Kernel& kernel;
  Metas out;  // with the strides that the kernel asks for
  Plan plan;

  /// True when the kernel needs a dense copy of operand `i`.
  bool needs_dense(size_t i, const Tensor& operand) const {
    return (plan.all_dense || (i < 32 && plan.dense_in >> i & 1)) && !operand.is_contiguous();
  }
};

inline KernelCall plan_call(const Primitive& prim, const Kernel& kernel,
                            std::span<const Tensor> in) {
  MetaPointers metas = metas_of(in);
  KernelCall call{kernel, prim.infer(metas), {}};
  if (kernel.plan) kernel.plan(prim, in, call.out, call.plan);
  return call;
}

/// True when a result of type `out` may take over the memory of `in`.
inline bool same_layout(const Meta& in, const Meta& out) {
  return in.dtype == out.dtype && in.device == out.device && in.shape == out.shape &&
         in.strides == out.strides;
}

/// True when writing `dst` does not disturb reading `in`, which is in the same storage: they do not
/// overlap, or they are exactly the same elements and the kernel may write `in_place`.
inline bool harmless(const Tensor& dst, const Tensor& in, bool in_place) {
  bool same_place = in.offset() == dst.offset() && same_layout(in.meta(), dst.meta());
  bool disjoint =
      in.is_contiguous() && dst.is_contiguous() && in.dtype() == dst.dtype() &&
      (in.offset() + in.numel() <= dst.offset() || dst.offset() + dst.numel() <= in.offset());
  return disjoint || (same_place && in_place);
}

/// True when the kernel may write straight into `dst`: each destination shares memory with no
/// operand, or is exactly the operand that the plan lets a result overwrite. Operands are sorted by
/// storage, so that long lists (optimizers) stay cheap.
inline bool writes_in_place(const KernelCall& call, std::span<const Tensor> dst,
                            std::span<const Tensor> in) {
  SmallVector<const Tensor*, 8> sorted;
  for (const Tensor& t : in)
    if (t.storage()) sorted.push_back(&t);
  auto storage = [](const Tensor* t) { return t->storage().get(); };
  std::sort(sorted.begin(), sorted.end(),
            [&](auto* a, auto* b) { return storage(a) < storage(b); });
  for (size_t i = 0; i < dst.size(); ++i) {
    if (!(dst[i].strides() == call.out[i].strides)) return false;
    auto it = std::lower_bound(sorted.begin(), sorted.end(), storage(&dst[i]),
                               [&](auto* a, Storage* s) { return storage(a) < s; });
    for (; it != sorted.end() && storage(*it) == storage(&dst[i]); ++it)
      if (!harmless(dst[i], **it, call.plan.in_place || call.plan.assign_in_place)) return false;
  }
  return true;
}

/// Throws ShapeError unless `dst` can take results of types `out`.
void check_destinations(const Primitive& prim, std::span<const Tensor> dst, const Metas& out);

}  // namespace tessera
