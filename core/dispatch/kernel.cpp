#include "core/dispatch/kernel.h"

#include "core/dispatch/other_kernels.h"

namespace tessera {
namespace {

KernelTable& table_of_process() {
  static KernelTable* table = [] {
    auto* t = new KernelTable;
    register_kernels(*t);
    return t;
  }();
  return *table;
}

std::array<KernelOf, kMaxDeviceKinds> others{};

}  // namespace

void KernelTable::add(DeviceKind device, std::string_view op, Kernel kernel) {
  OpId id = intern_op(op);
  auto& kernels = table_[size_t(device)];
  if (kernels.size() <= id) kernels.resize(size_t(id) + 1);
  kernels[id] = kernel;
}

const KernelTable& kernel_table() { return table_of_process(); }
void add_kernels(void (*add)(KernelTable&)) { add(table_of_process()); }

void add_other_kernels(DeviceKind device, KernelOf kernel_of) {
  others[size_t(device)] = kernel_of;
}
const Kernel* other_kernel(DeviceKind device, const Primitive& prim) {
  const KernelOf kernel_of = others[size_t(device)];
  return kernel_of ? kernel_of(prim) : nullptr;
}

}  // namespace tessera
