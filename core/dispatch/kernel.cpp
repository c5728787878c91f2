#include "core/dispatch/kernel.h"

namespace tessera {

void KernelTable::add(DeviceKind device, std::string_view op, Kernel kernel) {
  OpId id = intern_op(op);
  auto& kernels = table_[size_t(device)];
  if (kernels.size() <= id) kernels.resize(size_t(id) + 1);
  kernels[id] = kernel;
}

const KernelTable& kernel_table() {
  static const KernelTable* table = [] {
    auto* t = new KernelTable;
    register_kernels(*t);
    return t;
  }();
  return *table;
}

}  // namespace tessera
