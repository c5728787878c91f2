// Tensors that are made from numbers: full, arange.
#include "core/backend/cuda/kernels/random.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/pointwise.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/runtime.h"
#include "core/ops/create_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cuda {
namespace {

void run_full(const Primitive& prim, std::span<const Tensor>, std::span<const Tensor> out,
              Workspace, const Stream& stream) {
  fill(out[0], attributes_of<FullAttributes>(prim).value, stream);
}

void run_arange(const Primitive& prim, std::span<const Tensor>, std::span<const Tensor> out,
                Workspace, const Stream& stream) {
  const auto& a = attributes_of<ArangeAttributes>(prim);
  if (a.count == 0) return;
  ArangeCall c{};
  c.out = out[0].device_data(), c.count = countable(a.count, "arange");
  c.real = a.begin.kind() == kF64 || a.step.kind() == kF64;
  c.begin = a.begin.real(), c.step = a.step.real();
  c.first = a.begin.integer(), c.each = a.step.integer();
  launch(arange_instance(a.dtype).name, "arange", cover(a.count, 256), stream, c);
}

}  // namespace

void register_create(KernelTable& table) {
  const DeviceKind cuda = register_cuda();
  table.add(cuda, "full", {.run = run_full});
  table.add(cuda, "arange", {.run = run_arange});
}

}  // namespace tessera::cuda
