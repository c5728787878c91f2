// Plans that cost more to make than to find again (Kernel::keeps_plan), by op with its attributes,
// metas of the operands and PlanSettings. A call whose plan is kept neither infers its results nor
// plans, and allocates nothing. Invariant: a cache belongs to one thread, or to one executor, so
// nobody else runs what it keeps.
#pragma once
#include <unordered_map>

#include "core/dispatch/call.h"

namespace tessera {

class PlanCache {
 public:
  /// Plans that are kept at most: a program with ever new shapes starts over rather than grows.
  static constexpr size_t kCapacity = 2048;

  /// The call of `prim` by `kernel` on `in` under the settings of the calling thread, as plan_call
  /// plans it. Kernels that do not keep their plans are planned each time. Throws what infer and
  /// the plan throw, and keeps nothing then.
  KernelCall plan(const PrimRef& prim, const Kernel& kernel, std::span<const Tensor> in) {
    return kernel.keeps_plan ? find(prim, kernel, in) : plan_call(*prim, kernel, in);
  }
  /// The same by the cache of the calling thread, which only kernels that keep their plans look up.
  static KernelCall plan_for_thread(const PrimRef& prim, const Kernel& kernel,
                                    std::span<const Tensor> in) {
    return kernel.keeps_plan ? of_thread().find(prim, kernel, in) : plan_call(*prim, kernel, in);
  }
  size_t size() const { return entries_.size(); }

  /// The one of the calling thread, which ends with it.
  static PlanCache& of_thread();

 private:
  struct Entry {
    PrimRef prim;
    const Kernel* kernel;
    PlanSettings settings;
    SmallVector<Meta, 2> in;
    Metas out;
    Plan plan;

    bool is_of(const Kernel& k, const PlanSettings& s, std::span<const Tensor> operands) const;
  };
  using Entries = std::unordered_multimap<uint64_t, Entry>;

  KernelCall find(const PrimRef& prim, const Kernel& kernel, std::span<const Tensor> in);

  Entries entries_;
};

}  // namespace tessera
