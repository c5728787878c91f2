#include "tests/vgpu/fake/order.h"

namespace vgpu {

void Order::submitted(const Op& op) {
  text_ += "op\t" + std::to_string(op.number) + '\t' + std::to_string(op.device) + '\t' +
           std::to_string(op.lane) + '\t';
  for (const OpRef& a : op.after) text_ += std::to_string(a->number) + ',';
  text_ += '\t' + op.name + '\n';
}

void Order::host_waits(int device, const std::string& name) {
  text_ += "wait\t" + std::to_string(device) + '\t' + name + '\n';
}

}  // namespace vgpu
