// Kernels, keyed by (op, device). Planning is apart from running: a plan says what the kernel needs
// (output strides, an operand that an output may overwrite, dense operands, scratch), the backend
// provides that, and the kernel only computes. What else planning computed (Plan::state) is passed
// to the run. Invariant: a plan runs under the settings that it was made under, so the number of
// threads and the order of sums are fixed when a call is planned.
#pragma once
#include <array>
#include <vector>

#include "core/base/deterministic.h"
#include "core/base/error.h"
#include "core/base/matmul_precision.h"
#include "core/base/parallel.h"
#include "core/primitive/primitive.h"
#include "core/tensor/stream.h"

namespace tessera {

/// What a plan depends on besides the op and its operands. Code that keeps a plan compares the
/// settings of its thread with those of the plan before it runs the plan, and makes a new one where
/// they differ.
struct PlanSettings {
  int threads = 1;
  bool deterministic = false;
  MatmulPrecision precision = MatmulPrecision::kHighest;

  static PlanSettings of_thread() {
    return {num_threads(), deterministic_algorithms(), float32_matmul_precision()};
  }
  bool operator==(const PlanSettings&) const = default;
};

struct Plan {
  // An output may overwrite an operand of the same layout that has no other owner.
  bool in_place = false;
  bool assign_in_place = false;  // assign may write straight over operands that are destinations
  // Bit i: operand i must be row-major dense; the backend copies it if it is not.
  uint32_t dense_in = 0;
  bool all_dense = false;        // as dense_in with every bit set, for operand lists longer than 32
  bool any_strides_out = false;  // outputs may have other strides than planned, 1 in their last dim
  bool uncapturable = false;     // as Kernel::uncapturable
  size_t workspace_bytes = 0;
  // What planning computed for `run`, of a type that only the kernel knows: a primitive of a
  // library, a choice of algorithm. `run` may write to scratch in it, so two threads never run
  // plans that share a state at the same time.
  Ref<const RefCounted> state;
  // `plan` may change the strides of outputs, in the metas that it is given; they start dense.
};

/// What a kernel call is given beside operands and results: scratch of as many bytes as
/// Plan::workspace_bytes says, 64-byte aligned, from the device's allocator, and the state that the
/// plan left.
struct Workspace {
  void* data = nullptr;
  const RefCounted* state = nullptr;

  /// The state, which the plan of the same kernel made as a `T`.
  template <class T>
  const T& planned() const {
    TESSERA_ASSERT(state, "kernel: run without what its plan found out");
    return static_cast<const T&>(*state);
  }
};

/// On a device, `run` enqueues and returns before the kernel has run. What the kernel reads then
/// (the primitive, the plan's state, settings of the calling thread) is kept by the kernel.
struct Kernel {
  /// May be null: dense results, nothing reused, any operand strides accepted, no scratch.
  void (*plan)(const Primitive&, std::span<const Tensor> in, std::span<Meta> out, Plan&) = nullptr;
  /// Fills `out`. Operands have the strides that the plan accepted.
  void (*run)(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
              const Stream&) = nullptr;
  /// Looking a plan up costs less than making it, so backends keep it (plan_cache.h). Such a plan
  /// depends on the op's attributes, the metas of its operands and PlanSettings, nothing else.
  bool keeps_plan = false;
  /// Operands without dims may be on the CPU beside others on a device: the kernel reads them on
  /// the host and passes them by value. Else the backend copies them to the device.
  bool host_scalars = false;
  /// `run` waits for the device, looks at values, or runs other ops: it cannot be captured
  /// (DeviceRuntime::capture). Where that depends on operands, the plan says so.
  bool uncapturable = false;
  explicit operator bool() const { return run != nullptr; }
};

class KernelTable {
 public:
  void add(DeviceKind device, std::string_view op, Kernel kernel);
  /// A kernel whose `run` is null when the device has none for the op.
  const Kernel& find(DeviceKind device, OpId op) const {
    const auto& kernels = table_[size_t(device)];
    return op < kernels.size() ? kernels[op] : none_;
  }

 private:
  std::array<std::vector<Kernel>, kMaxDeviceKinds> table_;
  Kernel none_;
};

/// The table, filled on first use by register_kernels and what was given to add_kernels.
const KernelTable& kernel_table();
/// For a device outside the tree: lets `add` put its kernels into the table. Not to be called while
/// other threads run ops.
void add_kernels(void (*add)(KernelTable&));
/// Adds the kernels of every backend of the build; defined in core/backend/register.cpp, the one
/// place that names them.
void register_kernels(KernelTable& table);

}  // namespace tessera
