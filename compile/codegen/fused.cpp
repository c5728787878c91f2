#include "compile/codegen/fused.h"

#include "compile/codegen/access_order.h"
#include "compile/codegen/device_kernels.h"
#include "core/base/boundary.h"
#include "core/dispatch/call.h"
#include "core/primitive/attributes.h"

namespace tessera::compiler {
namespace {

// The op takes as many operands as its body has, maybe none.
const OpInfo kFused{
    "fused", {.kind = OpKind::kOther, .precision = Precision::kAsGiven, .takes_storage = true}};

// A plan cannot say which result may lie over which operand: either every result may lie over every
// operand of its layout, or none may.
bool may_run_in_place(const Body& body, std::span<const Tensor> in, std::span<const Meta> out) {
  const std::optional<Schedule> schedule = make_schedule(body);
  if (!schedule) return false;
  const AccessOrder order(*schedule);
  for (size_t i = 0; i < in.size(); ++i)
    for (size_t k = 0; k < out.size(); ++k)
      if (same_layout(in[i].meta(), out[k]) && !order.may_overwrite(int(i), int(k))) return false;
  return true;
}

void plan_fused(const Primitive& prim, std::span<const Tensor> in, std::span<Meta> out,
                Plan& plan) {
  const auto& fused = static_cast<const Fused&>(prim);
  for (size_t i = 0; i < out.size(); ++i) out[i].strides = fused.results[i].strides;
  plan.in_place = may_run_in_place(fused.body, in, out);
  if (fused.code) plan.workspace_bytes = fused.code->code.scratch_bytes;
}

void run_fused(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
               Workspace workspace, const Stream&) {
  const auto& fused = static_cast<const Fused&>(prim);
  if (!fused.code) return interpret_body(fused.body, in, out);
  SmallVector<char*, 16> p;
  for (const Tensor& t : in)  // generated code only reads them
    p.push_back(static_cast<char*>(const_cast<void*>(t.raw_values())));
  for (const Tensor& t : out) p.push_back(static_cast<char*>(t.raw()));
  const int64_t* numbers = fused.code->code.numbers;
  if (numbers) p.push_back(reinterpret_cast<char*>(const_cast<int64_t*>(numbers)));
  run_code(fused.code->code, p.data(), static_cast<char*>(workspace.data));
}

constexpr Kernel kKernel{plan_fused, run_fused};

void plan_on_device(const Primitive& prim, std::span<const Tensor>, std::span<Meta> out,
                    Plan& plan) {
  const auto& fused = static_cast<const Fused&>(prim);
  for (size_t i = 0; i < out.size(); ++i) out[i].strides = fused.results[i].strides;
  if (!fused.on_device) return;
  plan.in_place = fused.on_device->in_place;
  plan.workspace_bytes = fused.on_device->scratch_bytes;
}

void run_on_device(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                   Workspace workspace, const Stream& stream) {
  const auto& fused = static_cast<const Fused&>(prim);
  if (!fused.on_device) return interpret_body(fused.body, in, out);
  fused.on_device->launch(in, out, workspace.data, stream);
}

constexpr Kernel kOnDevice{plan_on_device, run_on_device, false, /*host_scalars=*/true};

}  // namespace

void run_code(const KernelCode& code, char* const* p, char* scratch) {
  parallel_for("generated.threads", code.chunks, code.parallel_grain,
               [&](int64_t begin, int64_t end) {
                 for (int64_t chunk = begin; chunk < end; ++chunk) code.run(p, chunk, scratch);
               });
  if (code.finish) code.finish(p, scratch);
}

Fused::Fused(std::string name, Body body, Metas results, Ref<const DeviceKernel> code)
    : Primitive(kFused),
      name(std::move(name)),
      body(std::move(body)),
      results(std::move(results)),
      on_device(std::move(code)) {}
Fused::~Fused() = default;

Fused::Fused(std::string name, Body body, Metas results, Ref<const LoadedKernel> code)
    : Primitive(kFused),
      name(std::move(name)),
      body(std::move(body)),
      results(std::move(results)),
      code(std::move(code)) {
  check(this->body);
  TESSERA_ASSERT(this->results.size() == this->body.stores.size(), "fused {}: {} results of {}",
                 this->name, this->results.size(), this->body.stores.size());
}

Metas Fused::infer(MetaSpan in) const {
  TESSERA_CHECK_AS(ShapeError, in.size() == body.operands.size(), "{}: {} operands, made for {}",
                   name, in.size(), body.operands.size());
  for (size_t i = 0; i < in.size(); ++i)
    TESSERA_CHECK_AS(ShapeError, in[i]->dtype == body.operands[i].dtype,
                     "{}: operand {} is {}{}, made for {}", name, i, name_of(in[i]->dtype),
                     tessera::to_string(in[i]->shape), name_of(body.operands[i].dtype));
  return results;
}

void Fused::attributes(AttributeVisitor& v) const {
  v.text("name", name);
  v.text("body", to_string(body));
  for (const Meta& m : results) {
    v.dims("shape", m.shape);
    v.dims("strides", m.strides);
  }
}

const Kernel* Fused::own_kernel(DeviceKind device) const {
  if (device != results[0].device.kind) return nullptr;
  return device == DeviceKind::kCPU ? &kKernel : &kOnDevice;
}

const Fused* as_fused(const Primitive& prim) {
  return prim.id() == kFused.id ? static_cast<const Fused*>(&prim) : nullptr;
}

}  // namespace tessera::compiler
