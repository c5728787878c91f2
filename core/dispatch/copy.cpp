#include "core/dispatch/copy.h"

#include <algorithm>
#include <mutex>

#include "core/dispatch/call.h"
#include "core/dispatch/device_span.h"
#include "core/dispatch/dispatch.h"
#include "core/primitive/primitive_of.h"
#include "core/tensor/device_runtime.h"
#include "core/tensor/ready_lock.h"

namespace tessera {
namespace {

class Copy final : public Primitive {
 public:
  static inline const OpInfo kOp{"copy",
                                 {.kind = OpKind::kOther,
                                  .precision = Precision::kAsGiven,
                                  .operands = 1,
                                  .plain = true,
                                  .takes_storage = true}};
  Copy() : Primitive(kOp) {}
  Metas infer(MetaSpan in) const override {
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = pointwise_axes(in, in[0]->shape);
    m.jointly_linear = true;
    return m;
  }
  Tensors vjp(const VjpArgs& v) const override { return {v.cot[0]}; }
};

struct TransferAttributes {
  Device device;
  static void fields(auto& a, auto& f) { f("device", a.device); }
};

// Lets `to`, which is dense, take the bytes of `from`, dense too, on another device.
void move_bytes(const Tensor& from, const Tensor& to) {
  Storage &source = *from.storage(), &target = *to.storage();
  // Between devices of two kinds the bytes take the way through the host.
  if (!from.device().is_cpu() && !to.device().is_cpu() && from.device().kind != to.device().kind) {
    const Tensor between = empty(Meta::contiguous(from.shape(), from.dtype(), kCPU));
    move_bytes(from, between);
    return move_bytes(between, to);
  }
  // The stream of the device; between two of a kind that of the source.
  const Device device = from.device().is_cpu() ? to.device() : from.device();
  DeviceRuntime& runtime = runtime_of(device);
  const Stream stream = runtime.stream(device.index);
  source.wait_ready(stream), target.wait_writable(stream);
  DeviceSpan span("transfer", stream);
  const bool host_in_use = runtime.copy(to.device_data(), to.device(), from.device_data(),
                                        from.device(), from.nbytes(), stream);
  for (Storage* s : {&source, &target}) {
    const bool writes = s == &target;
    if (!s->device().is_cpu()) {
      s->used_on(stream, writes);
    } else if (host_in_use) {
      Ref<Event> copied = runtime.record(stream);
      std::lock_guard lock(ready_lock());  // several threads may read one storage
      if (writes)
        s->set_ready(std::move(copied));
      else if (copied)
        s->add_reader(std::move(copied));
    }
  }
}

// Whether the elements of `t` lie next to each other, in some order of its dims.
bool fills_its_memory(const Tensor& t) {
  SmallVector<int, kMaxDims> order;
  for (int d = 0; d < t.ndim(); ++d) order.push_back(d);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return t.strides()[a] < t.strides()[b]; });
  int64_t dense = 1;
  for (int d : order) {
    if (t.strides()[d] != dense && t.shape()[d] != 1) return false;
    dense *= t.shape()[d];
  }
  return true;
}

class Transfer final : public PrimitiveOf<Transfer, TransferAttributes> {
 public:
  static inline const OpInfo kOp{"transfer",
                                 {.kind = OpKind::kOther,
                                  .precision = Precision::kAsGiven,
                                  .operands = 1,
                                  .plain = true,
                                  .takes_storage = true}};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override {
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = pointwise_axes(in, in[0]->shape);
    m.jointly_linear = true;
    return m;
  }
  Tensors vjp(const VjpArgs& v) const override {
    return {dispatch1(transfer_primitive(v.in[0].device()), operands(Tensor(v.cot[0])))};
  }
  const Kernel* own_kernel(DeviceKind) const override {
    static const Kernel kernel{
        [](const Primitive&, std::span<const Tensor> in, std::span<Meta> out, Plan& plan) {
          if (fills_its_memory(in[0]))
            out[0].strides = in[0].strides();
          else
            plan.dense_in = 1;
        },
        [](const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
           const Stream&) { move_bytes(in[0], out[0]); }};
    return &kernel;
  }
};

}  // namespace

PrimRef transfer_primitive(Device device) { return PrimRef(new Transfer({device})); }

Tensor transferred(const Tensor& t, Device device) {
  const Meta meta = Meta::contiguous(t.shape(), t.dtype(), device);
  if (device.is_meta()) return empty(meta);
  const bool out_of_device = device.is_cpu() && !t.device().is_cpu();
  Tensor out =
      out_of_device ? empty_in(meta, runtime_of(t.device()).host_allocator()) : empty(meta);
  move_bytes(t.is_contiguous() ? t : dense_copy(t), out);
  return out;
}

Tensor on_host(const Tensor& t) {
  const bool readable = t.device().is_cpu() || runtime_of(t.device()).host_addressable();
  return readable ? t : transferred(t, kCPU);
}

const PrimRef& copy_primitive() {
  static const PrimRef copy(new Copy);
  return copy;
}

void copy_values(const Tensor& dst, const Tensor& src) {
  const Kernel& kernel = find_kernel(*copy_primitive(), src.device());
  TESSERA_ASSERT(kernel, "copy: no kernel for {}", to_string(src.device()));
  const Stream stream = stream_of(src.device());
  src.storage()->wait_ready(stream);
  dst.storage()->wait_writable(stream);
  DeviceSpan span(copy_primitive()->name(), stream);
  kernel.run(*copy_primitive(), {&src, 1}, {&dst, 1}, {}, stream);
  src.storage()->used_on(stream, /*writes=*/false);
  dst.storage()->used_on(stream, /*writes=*/true);
}

Tensor dense_copy(const Tensor& t) {
  Tensor out = empty(Meta::contiguous(t.shape(), t.dtype(), t.device()));
  copy_values(out, t);
  return out;
}

}  // namespace tessera
