// The eager backend: infer, plan, allocate or take over, run.
#include <algorithm>

#include "core/dispatch/backend.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/kernel.h"

namespace tessera {
namespace {

using MetaPointers = SmallVector<const Meta*, 8>;

MetaPointers metas_of(Inputs in) {
  MetaPointers m;
  for (const Tensor& t : in) m.push_back(&t.meta());
  return m;
}

Device common_device(const PrimRef& prim, Inputs in) {
  Device device = in.empty() ? prim->infer({})[0].device : in[0].device();  // of creation: its own
  for (const Tensor& t : in)
    TESSERA_CHECK(t.device() == device, "{}: operands are on {} and {}; move them to one device",
                  prim->name(), to_string(device), to_string(t.device()));
  return device;
}

bool may_reuse(const Tensor& t, const Meta& out) {
  return t.uniquely_owned() && t.dtype() == out.dtype && t.shape() == out.shape &&
         t.strides() == out.strides && !t.storage()->ready();
}

// A second handle on an operand that this result may overwrite (the kernel still reads it through
// the first), or memory of its own. After the first taker the operand's storage has two owners, so
// no other result takes it too.
Tensor take_over(Inputs in, const Meta& out) {
  for (const Tensor& t : in)
    if (may_reuse(t, out)) return Tensor(out, t.storage(), t.offset());
  return empty(out);
}

// The device's kernel or the one that the op brings along; false when there is neither.
const Kernel& find_kernel(const PrimRef& prim, Device device) {
  const Kernel& kernel = kernel_table().find(device.kind, prim->id());
  if (kernel) return kernel;
  const Kernel* own = prim->own_kernel(device.kind);
  return own ? *own : kernel;
}

struct Call {
  const Kernel& kernel;
  Metas out;
  Plan plan;
};

Call prepare(const PrimRef& prim, const Kernel& kernel, Inputs in) {
  MetaPointers metas = metas_of(in);
  Call call{kernel, prim->infer(metas), {}};
  if (kernel.plan) kernel.plan(*prim, in, call.out, call.plan);
  for (size_t i = 0; i < in.size(); ++i) {
    bool dense = call.plan.all_dense || (i < 32 && call.plan.dense_in >> i & 1);
    if (dense && !in[i].is_contiguous()) in[i] = dense_copy(in[i]);
  }
  return call;
}

void execute(const PrimRef& prim, const Call& call, Inputs in, std::span<const Tensor> out) {
  for (const Tensor& t : in)
    if (t.storage()) t.storage()->wait_ready();
  if (call.plan.workspace_bytes == 0) return call.kernel.run(*prim, in, out, {}, context().stream);
  Tensor scratch = empty({int64_t(call.plan.workspace_bytes)}, kU8, out[0].device());
  call.kernel.run(*prim, in, out, {scratch.raw(), call.plan.workspace_bytes}, context().stream);
}

class EagerBackend final : public Backend {
 public:
  Tensors run(const PrimRef& prim, Inputs in) override {
    if (prim->is_view()) return mark_inference(prim->view(in));
    Tensors out;
    Device device = common_device(prim, in);
    if (device.is_meta()) {
      for (Meta& m : prim->infer(metas_of(in))) out.push_back(empty(m));
      return mark_inference(std::move(out));
    }
    const Kernel& kernel = find_kernel(prim, device);
    if (!kernel) return run_decomposed(prim, in, device);
    Call call = prepare(prim, kernel, in);
    for (const Meta& m : call.out) out.push_back(call.plan.in_place ? take_over(in, m) : empty(m));
    execute(prim, call, in, out);
    return mark_inference(std::move(out));
  }

  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override {
    Device device = common_device(prim, in);
    for (const Tensor& d : dst)
      TESSERA_CHECK(d.device() == device,
                    "assign_: destination is {}, the value is on {}; move it first", describe(d),
                    to_string(device));
    const Kernel* kernel = nullptr;
    if (!prim->is_view() && !device.is_meta()) kernel = &find_kernel(prim, device);
    if (kernel && *kernel) {
      Call call = prepare(prim, *kernel, in);
      check_destinations(prim, dst, call.out);
      if (writes_in_place(call, dst, in)) {
        for (const Tensor& d : dst) d.storage()->wait_ready();
        execute(prim, call, in, dst);
        for (const Tensor& d : dst) d.storage()->bump_version();
        return;
      }
    } else {
      check_destinations(prim, dst, prim->infer(metas_of(in)));
    }
    Tensors results = run(prim, in);
    for (size_t i = 0; i < dst.size(); ++i) {
      if (!device.is_meta()) copy_values(dst[i], results[i]);
      dst[i].storage()->bump_version();
    }
  }

 private:
  static Tensors mark_inference(Tensors out) {
    if (context().inference) [[unlikely]]
      for (Tensor& t : out) t.impl()->inference = true;
    return out;
  }
  static Tensors run_decomposed(const PrimRef& prim, Inputs in, Device device) {
    TESSERA_CHECK(prim->decomposable(), "{}: no kernel for {} and no decomposition ({})",
                  prim->name(), to_string(device), describe(metas_of(in)));
    Scoped<LayerMask> below_all_layers(context().enabled, 0);
    return prim->decompose(in);
  }

  static void check_destinations(const PrimRef& prim, std::span<const Tensor> dst,
                                 const Metas& out) {
    TESSERA_CHECK_AS(ShapeError, dst.size() == out.size(),
                     "assign_: {} destinations for {} results of {}", dst.size(), out.size(),
                     prim->name());
    for (size_t i = 0; i < dst.size(); ++i)
      TESSERA_CHECK_AS(ShapeError, dst[i].shape() == out[i].shape && dst[i].dtype() == out[i].dtype,
                       "assign_: destination is {}, the value is {}{}", describe(dst[i]),
                       name_of(out[i].dtype), to_string(out[i].shape));
  }

  // A kernel may write straight into a destination that no operand shares memory with, or that is
  // the very operand the plan lets a result take over. Operands are sorted by storage so that long
  // lists (optimizers) stay cheap.
  static bool writes_in_place(const Call& call, std::span<const Tensor> dst, Inputs in) {
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

  static bool harmless(const Tensor& dst, const Tensor& in, bool in_place) {
    bool same_place = in.offset() == dst.offset() && in.shape() == dst.shape() &&
                      in.strides() == dst.strides() && in.dtype() == dst.dtype();
    bool disjoint =
        in.is_contiguous() && dst.is_contiguous() && in.dtype() == dst.dtype() &&
        (in.offset() + in.numel() <= dst.offset() || dst.offset() + dst.numel() <= in.offset());
    return disjoint || (same_place && in_place);
  }
};

}  // namespace

Backend& eager_backend() {
  static EagerBackend backend;
  return backend;
}

}  // namespace tessera
