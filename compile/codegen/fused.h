// An op that the fusion pass made of others: a body, the memory layouts of its results and, once it
// is generated, code. Invariant: it computes the same function with and without code, so the
// interpreter can run a graph of fused ops and its results can be compared.
#pragma once
#include "compile/codegen/body.h"
#include "core/primitive/primitive.h"

namespace tessera::compiler {

/// The generated code of one body. `run` computes one of `chunks`. Kernels with sums over rows
/// leave partial results of each chunk in `scratch`, and `finish` combines these in order. `p` has
/// the addresses of the first elements of operands, then of results.
struct KernelCode {
  using Run = void (*)(char* const* p, int64_t chunk, char* scratch);
  using Finish = void (*)(char* const* p, char* scratch);
  Run run = nullptr;
  Finish finish = nullptr;     // null: nothing to combine
  int64_t chunks = 1;          // of about equal work; a property of the body, not of the threads
  int64_t parallel_grain = 1;  // chunks that are worth a thread
  size_t scratch_bytes = 0;    // of all chunks together
  // Sizes that the code takes at run time, passed after the addresses of results; null: it takes
  // none.
  const int64_t* numbers = nullptr;
};
/// Runs all chunks on the threads of the calling one, then finish.
void run_code(const KernelCode& code, char* const* p, char* scratch);

/// Keeps the shared object that `code` points into loaded.
struct LoadedKernel : RefCounted {
  KernelCode code;
};

struct DeviceKernel;  // compile/codegen/device_kernels.h

class Fused final : public Primitive {
 public:
  /// `results`: shape, strides and dtype of each result, as the replaced ops had them. `name` says
  /// what the kernel is made of: "h_0_mlp_add_gelu".
  Fused(std::string name, Body body, Metas results, Ref<const LoadedKernel> code = {});
  /// With code for the device that `results` are on.
  Fused(std::string name, Body body, Metas results, Ref<const DeviceKernel> code);
  ~Fused() override;

  int64_t operand_count() const override { return int64_t(body.operands.size()); }
  Metas infer(MetaSpan in) const override;
  void attributes(AttributeVisitor& v) const override;
  /// Runs the code, or interprets the body where there is none. A result may be written over an
  /// operand with the same address for every element (in_place in the plan) if all of these are
  /// read before they are written (compile/codegen/access_order.h).
  const Kernel* own_kernel(DeviceKind) const override;
  Device device() const { return results[0].device; }

  const std::string name;  // of the kernel; the op's name is "fused"
  const Body body;
  const Metas results;
  const Ref<const LoadedKernel> code;       // null: interpreted on the CPU
  const Ref<const DeviceKernel> on_device;  // null: interpreted on a device
};

/// The fused op of `prim`, or null.
const Fused* as_fused(const Primitive& prim);

}  // namespace tessera::compiler
