// Kernels, keyed by (op, device). Planning is apart from running: the plan says what the kernel
// needs (output strides, which operand an output may take over, dense operands, scratch), the
// backend provides it, the kernel only computes.
#pragma once
#include <array>
#include <vector>

#include "core/dispatch/context.h"
#include "core/primitive/primitive.h"

namespace tessera {

struct Plan {
  // An output may overwrite an operand of the same layout that nobody else owns.
  bool in_place = false;
  bool assign_in_place = false;  // assign may write straight over operands that are destinations
  // Bit i: operand i must be row-major dense; the backend copies it if it is not.
  uint32_t dense_in = 0;
  bool all_dense = false;        // as dense_in with every bit set, for operand lists longer than 32
  bool any_strides_out = false;  // outputs may have other strides than planned, 1 in their last dim
  size_t workspace_bytes = 0;
  // Strides of outputs may be changed in place in the metas that plan receives; they start dense.
};

/// Scratch of one kernel call, 64-byte aligned, from the device's allocator.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

struct Kernel {
  /// May be null: dense results, nothing reused, any operand strides accepted, no scratch.
  void (*plan)(const Primitive&, std::span<const Tensor> in, std::span<Meta> out, Plan&) = nullptr;
  /// Fills `out`. Operands have the strides that the plan accepted.
  void (*run)(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
              const Stream&) = nullptr;
  explicit operator bool() const { return run != nullptr; }
};

class KernelTable {
 public:
  void add(DeviceKind device, std::string_view op, Kernel kernel);
  /// Null run when the device has no kernel for the op.
  const Kernel& find(DeviceKind device, OpId op) const {
    const auto& kernels = table_[size_t(device)];
    return op < kernels.size() ? kernels[op] : none_;
  }

 private:
  std::array<std::vector<Kernel>, kNumDeviceKinds> table_;
  Kernel none_;
};

/// The table, filled on first use by register_kernels.
const KernelTable& kernel_table();
/// Adds the kernels of every backend of the build; defined in core/backend/register.cpp, the one
/// place that names them.
void register_kernels(KernelTable& table);

}  // namespace tessera
