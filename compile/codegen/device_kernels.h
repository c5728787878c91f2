// Generated code for devices that compile CUDA C++: the text of fused ops, compiled and found again
// by their runtime, and the launch of it.
#pragma once
#include <span>
#include <vector>

#include "compile/codegen/fused.h"
#include "core/tensor/device_runtime.h"

namespace tessera::compiler {

/// Whether kernels can be generated for `d`: the CPU's by its compiler, others by their runtime.
bool generates_code(Device d);
/// Whether print_cuda can print `body`.
bool gpu_schedulable(const Body& body);

/// The code of one body for one device.
struct DeviceKernel : RefCounted {
  Ref<DeviceProgram> program;
  size_t entry = 0;  // into the program's kernels; the next one joins partial results
  LaunchSize size, finish_size;
  size_t scratch_bytes = 0;  // 0: there is one kernel
  uint64_t numbers = 0;      // bit k: operand k is a number of the host, passed by value
  // By operand, then by result: the alignment in bytes that packs of elements need.
  std::vector<size_t> align;
  // Whether a result may lie over any operand of its layout.
  bool in_place = false;

  /// Enqueues the kernels. `scratch` has scratch_bytes.
  void launch(std::span<const Tensor> in, std::span<const Tensor> out, void* scratch,
              const Stream& stream) const;
};

/// A fused op, and which of its operands are numbers of the host.
struct DeviceSource {
  const Fused* fused = nullptr;
  uint64_t numbers = 0;
};

/// Generates code for `kernels`, all of which run on `device`; result i belongs to kernels[i].
/// Equal bodies are compiled once. Throws what DeviceRuntime::compile throws; the caller then runs
/// without generated code.
std::vector<Ref<const DeviceKernel>> generate_on(Device device,
                                                 std::span<const DeviceSource> kernels);

}  // namespace tessera::compiler
