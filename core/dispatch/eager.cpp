// The eager backend: infer, plan (or find the plan of an equal call), allocate or take over, run.
#include "core/base/profile.h"
#include "core/dispatch/backend.h"
#include "core/dispatch/call.h"
#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/device_span.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/plan_cache.h"
#include "core/tensor/device_runtime.h"

namespace tessera {
namespace {

// Where the call runs. Operands on other devices are refused, but for host numbers and keys: they
// are copied to the device where its kernel does not take them as they are.
Device common_device(const PrimRef& prim, Inputs in) {
  const Device device = device_of(*prim, in);
  for (Tensor& t : in) {
    if (t.device() == device) [[likely]]
      continue;
    TESSERA_CHECK(may_be_on_host(*prim, t.meta()),
                  "{}: operands are on {} and {}; move them to one device with to()", prim->name(),
                  to_string(device), to_string(t.device()));
    if (!find_kernel(*prim, device).host_scalars) t = transferred(t, device);
  }
  return device;
}

bool may_reuse(const Tensor& t, const Meta& out) {
  return t.uniquely_owned() && same_layout(t.meta(), out) && !t.storage()->pending();
}

// The memory for a result: that of an operand which it may overwrite, as a second handle (the
// kernel still reads the operand through the first), or a new tensor. The second handle makes two
// owners, so no other result takes the same operand.
Tensor take_over(Inputs in, const Meta& out, const Stream& stream) {
  for (const Tensor& t : in)
    if (may_reuse(t, out)) {
      // On the CPU its readers were owners too, so they are done: drops them.
      t.storage()->wait_writable(stream);
      if (Storage::any_assigned()) [[unlikely]]
        t.storage()->set_assigned({});  // the result has a history of its own
      return Tensor(out, t.storage(), t.offset());
    }
  return empty(out);
}

// The memory for a result of an op on `device`. What comes from a device to the host goes to memory
// that the copy need not be waited for.
Tensor result_of(const Meta& m, Device device) {
  if (m.device == device || !m.device.is_cpu()) [[likely]]
    return empty(m);
  return empty_in(m, runtime_of(device).host_allocator());
}

KernelCall prepare(const PrimRef& prim, const Kernel& kernel, Inputs in) {
  KernelCall call = PlanCache::plan_for_thread(prim, kernel, in);
  for (size_t i = 0; i < in.size(); ++i)
    if (call.needs_dense(i, in[i])) in[i] = dense_copy(in[i]);
  return call;
}

// Adds the op as an event to this thread's profile, if there is one.
class OpSpan {
 public:
  OpSpan(const PrimRef& prim, Inputs in) : span_(prim->name(), "op") {
    if (span_) [[unlikely]]
      span_.set_detail(fmt::format("{}({})", name_of(context().phase), describe(metas_of(in))));
  }

 private:
  ProfileSpan span_;
};

void execute(const PrimRef& prim, const KernelCall& call, Inputs in, std::span<const Tensor> out,
             const Stream& stream) {
  const bool on_cpu = stream.device.is_cpu();
  for (const Tensor& t : in)
    if (Storage* s = t.storage().get()) on_cpu ? s->wait_ready() : s->wait_ready(stream);
  const RefCounted* state = call.plan.state.get();
  DeviceSpan span(prim->name(), stream);
  if (call.plan.workspace_bytes == 0) {
    call.kernel.run(*prim, in, out, {nullptr, state}, stream);
  } else {
    Tensor scratch = empty({int64_t(call.plan.workspace_bytes)}, kU8, stream.device);
    call.kernel.run(*prim, in, out, {scratch.device_data(), state}, stream);
  }
  // A collective's operands and results are used on a stream of its group, which notes it.
  if (on_cpu || prim->traits().kind == OpKind::kCollective) [[likely]]
    return;
  for (const Tensor& t : in)
    if (t.storage()) t.storage()->used_on(stream, /*writes=*/false);
  for (const Tensor& t : out)  // a transfer has noted results on other devices itself
    if (t.device() == stream.device) t.storage()->used_on(stream, /*writes=*/true);
}

class EagerBackend final : public Backend {
 public:
  Tensors run(const PrimRef& prim, Inputs in) override {
    if (prim->is_view()) return mark_inference(prim->view(in));
    OpSpan span(prim, in);
    Tensors out;
    Device device = common_device(prim, in);
    if (device.is_meta()) {
      for (Meta& m : prim->infer(metas_of(in))) out.push_back(empty(m));
      return mark_inference(std::move(out));
    }
    const Kernel& kernel = find_kernel(*prim, device);
    if (!kernel) return run_decomposed(prim, in, device);
    KernelCall call = prepare(prim, kernel, in);
    const Stream stream = stream_of(device);
    for (const Meta& m : call.out)
      out.push_back(call.plan.in_place ? take_over(in, m, stream) : result_of(m, device));
    execute(prim, call, in, out, stream);
    return mark_inference(std::move(out));
  }

  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override {
    OpSpan span(prim, in);
    Device device = common_device(prim, in);
    for (const Tensor& d : dst)
      TESSERA_CHECK(d.device() == device,
                    "assign_: destination is {}, the value is on {}; move it first", describe(d),
                    to_string(device));
    const Kernel* kernel = nullptr;
    if (!prim->is_view() && !device.is_meta()) kernel = &find_kernel(*prim, device);
    if (kernel && *kernel) {
      KernelCall call = prepare(prim, *kernel, in);
      check_destinations(*prim, dst, call.out);
      if (writes_in_place(call, dst, in)) {
        const Stream stream = stream_of(device);
        for (const Tensor& d : dst) d.storage()->wait_writable(stream);
        execute(prim, call, in, dst, stream);
        for (const Tensor& d : dst) d.storage()->bump_version();
        return;
      }
    } else {
      check_destinations(*prim, dst, prim->infer(metas_of(in)));
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
    check_device(device, prim->name());
    TESSERA_CHECK(prim->decomposable(), "{}: no kernel for {} and no decomposition ({})",
                  prim->name(), to_string(device), describe(metas_of(in)));
    Scoped<LayerMask> below_all_layers(context().enabled, 0);
    return prim->decompose(in);
  }
};

}  // namespace

void check_destinations(const Primitive& prim, std::span<const Tensor> dst, const Metas& out) {
  TESSERA_CHECK_AS(ShapeError, dst.size() == out.size(),
                   "assign_: {} destinations for {} results of {}", dst.size(), out.size(),
                   prim.name());
  for (size_t i = 0; i < dst.size(); ++i)
    TESSERA_CHECK_AS(ShapeError, dst[i].shape() == out[i].shape && dst[i].dtype() == out[i].dtype,
                     "assign_: destination is {}, the value is {}{}", describe(dst[i]),
                     name_of(out[i].dtype), to_string(out[i].shape));
}

Backend& eager_backend() {
  static EagerBackend backend;
  return backend;
}

}  // namespace tessera
