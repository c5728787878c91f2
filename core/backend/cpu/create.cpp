// Kernels without operands: constants and ranges.
#include <algorithm>

#include "core/backend/cpu/register.h"
#include "core/ops/create_attributes.h"
#include "core/primitive/primitive_of.h"
#include "core/tensor/element.h"

namespace tessera::cpu {
namespace {

template <class T>
void fill(void* p, const void* value, int64_t n) {
  std::fill_n(static_cast<T*>(p), n, *static_cast<const T*>(value));
}

void run_full(const Primitive& prim, std::span<const Tensor>, std::span<const Tensor> out,
              Workspace, const Stream&) {
  uint64_t value = 0;
  write_scalar(&value, out[0].dtype(), attributes_of<FullAttributes>(prim).value);
  switch (size_of(out[0].dtype())) {
    case 1: return fill<uint8_t>(out[0].raw(), &value, out[0].numel());
    case 2: return fill<uint16_t>(out[0].raw(), &value, out[0].numel());
    case 4: return fill<uint32_t>(out[0].raw(), &value, out[0].numel());
    default: return fill<uint64_t>(out[0].raw(), &value, out[0].numel());
  }
}

void run_arange(const Primitive& prim, std::span<const Tensor>, std::span<const Tensor> out,
                Workspace, const Stream&) {
  const auto& a = attributes_of<ArangeAttributes>(prim);
  char* p = static_cast<char*>(out[0].raw());
  int64_t size = int64_t(size_of(a.dtype));
  if (a.begin.kind() == kF64 || a.step.kind() == kF64) {
    for (int64_t i = 0; i < out[0].numel(); ++i)
      write_real(p + i * size, a.dtype, a.begin.real() + a.step.real() * double(i));
  } else {
    for (int64_t i = 0; i < out[0].numel(); ++i)
      write_integer(p + i * size, a.dtype, a.begin.integer() + a.step.integer() * i);
  }
}

}  // namespace

void register_create(KernelTable& t) {
  t.add(DeviceKind::kCPU, "full", {nullptr, run_full});
  t.add(DeviceKind::kCPU, "arange", {nullptr, run_arange});
}

}  // namespace tessera::cpu
