#include "core/dispatch/kernel.h"

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

}  // namespace

void KernelTable::add(DeviceKind device, std::string_view op, Kernel kernel) {
  OpId id = intern_op(op);
  auto& kernels = table_[size_t(device)];
  if (kernels.size() <= id) kernels.resize(size_t(id) + 1);
  kernels[id] = kernel;
}

const KernelTable& kernel_table() { return table_of_process(); }
void add_kernels(void (*add)(KernelTable&)) { add(table_of_process()); }

}  // namespace tessera
