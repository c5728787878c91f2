// What a test asks of the order of ops: which of them may run beside each other, and where the host
// waited. Edges are those of streams and events alone: what the host has waited for orders nothing
// here, and it does not matter when an op ran. Invariant: used under the mutex of the virtual GPU.
#pragma once
#include <string>

#include "tests/vgpu/fake/op.h"

namespace vgpu {

class Order {
 public:
  /// A line "op NUMBER DEVICE LANE AFTER,AFTER NAME", split by tabs, as it is submitted.
  void submitted(const Op& op);
  /// A line "wait DEVICE NAME": the host waits, for an op or for all of a device.
  void host_waits(int device, const std::string& name);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace vgpu
