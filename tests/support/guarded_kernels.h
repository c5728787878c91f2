// Kernels of the CPU on guarded memory: code that the address sanitizer does not instrument, that
// of libraries above all, is seen when it writes beside its scratch or its results.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/dispatch/call.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/target.h"
#include "core/ops/create.h"
#include "core/tensor/device_runtime.h"

namespace tessera::test {

/// While one lives, kernels that the calling thread runs on the CPU have their scratch and their
/// results between guards, and a test fails whose kernels change these.
class GuardedKernels final : public Backend {
 public:
  Tensors run(const PrimRef& prim, Inputs in) override {
    const Kernel& kernel = find_kernel(*prim, kCPU);
    if (!kernel || prim->is_view() || !device_of(*prim, in).is_cpu())
      return eager_backend().run(prim, in);
    const KernelCall call = plan_call(*prim, kernel, in);
    for (size_t i = 0; i < in.size(); ++i)
      if (call.needs_dense(i, in[i])) in[i] = dense_copy(in[i]);
    Tensors out;
    std::vector<Guarded> memory;
    for (const Meta& m : call.out) {
      const auto bytes = int64_t(numel(m.shape) * size_of(m.dtype));
      out.emplace_back(m, memory.emplace_back(bytes).bytes.storage(),
                       kGuard / int64_t(size_of(m.dtype)));
    }
    const Guarded& scratch = memory.emplace_back(int64_t(call.plan.workspace_bytes));
    kernel.run(*prim, in, out, {scratch.begin(), call.plan.state.get()}, stream_of(kCPU));
    for (size_t i = 0; i < memory.size(); ++i)
      EXPECT_TRUE(memory[i].intact())
          << prim->name() << "(" << describe(metas_of(in)) << ") writes beside "
          << (i < out.size() ? "its results" : "its scratch");
    return out;
  }
  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override {
    eager_backend().assign(dst, prim, in);
  }

 private:
  static constexpr int64_t kGuard = 1 << 16;  // bytes on both sides
  static constexpr char kUntouched = 0x5a;
  struct Guarded {
    Tensor bytes;
    int64_t size;
    explicit Guarded(int64_t size) : bytes(empty({size + 2 * kGuard}, kU8)), size(size) {
      std::memset(bytes.raw(), kUntouched, size_t(bytes.numel()));
    }
    char* begin() const { return static_cast<char*>(bytes.raw()) + kGuard; }
    bool intact() const {
      const auto untouched = [](char c) { return c == kUntouched; };
      return std::all_of(begin() - kGuard, begin(), untouched) &&
             std::all_of(begin() + size, begin() + size + kGuard, untouched);
    }
  };

  BackendScope on_{{.backend = this}};
};

}  // namespace tessera::test
