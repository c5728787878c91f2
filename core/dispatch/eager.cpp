// The eager backend: infer, plan (or find the plan of an equal call), allocate or take over, run.
#include "core/base/profile.h"
#include "core/dispatch/backend.h"
#include "core/dispatch/call.h"
#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/plan_cache.h"

namespace tessera {
namespace {

Device common_device(const PrimRef& prim, Inputs in) {
  Device device = in.empty() ? prim->infer({})[0].device : in[0].device();  // creations: by infer
  for (const Tensor& t : in)
    TESSERA_CHECK(t.device() == device, "{}: operands are on {} and {}; move them to one device",
                  prim->name(), to_string(device), to_string(t.device()));
  return device;
}

bool may_reuse(const Tensor& t, const Meta& out) {
  return t.uniquely_owned() && same_layout(t.meta(), out) && !t.storage()->pending();
}

// The memory for a result: that of an operand which it may overwrite, as a second handle (the
// kernel still reads the operand through the first), or a new tensor. The second handle makes two
// owners, so no other result takes the same operand.
Tensor take_over(Inputs in, const Meta& out) {
  for (const Tensor& t : in)
    if (may_reuse(t, out)) {
      t.storage()->wait_writable();  // its readers were owners too, so they are done: drops them
      if (Storage::any_assigned()) [[unlikely]]
        t.storage()->set_assigned({});  // the result has a history of its own
      return Tensor(out, t.storage(), t.offset());
    }
  return empty(out);
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

void execute(const PrimRef& prim, const KernelCall& call, Inputs in, std::span<const Tensor> out) {
  for (const Tensor& t : in)
    if (t.storage()) t.storage()->wait_ready();
  const RefCounted* state = call.plan.state.get();
  if (call.plan.workspace_bytes == 0)
    return call.kernel.run(*prim, in, out, {nullptr, state}, context().stream);
  Tensor scratch = empty({int64_t(call.plan.workspace_bytes)}, kU8, out[0].device());
  call.kernel.run(*prim, in, out, {scratch.raw(), state}, context().stream);
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
    for (const Meta& m : call.out) out.push_back(call.plan.in_place ? take_over(in, m) : empty(m));
    execute(prim, call, in, out);
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
        for (const Tensor& d : dst) d.storage()->wait_writable();
        execute(prim, call, in, dst);
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
    TESSERA_CHECK(device.kind != DeviceKind::kCUDA,
                  "{}: no CUDA support in this build, asked for {}; use cpu or meta", prim->name(),
                  to_string(device));
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
