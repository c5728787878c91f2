// Plans that cost more to make than to look up (Kernel::keeps_plan), keyed by the op and its
// attributes, the metas of the operands and PlanSettings. A call whose plan is found here runs
// neither `infer` nor `plan` and allocates nothing. Invariant: a cache belongs to one thread or to
// one executor, so no two threads run the same plan at once.
#pragma once
#include <unordered_map>

#include "core/dispatch/call.h"

namespace tessera {

class PlanCache {
 public:
  /// The most plans kept: a full cache is emptied, so ever new shapes do not make it grow.
  static constexpr size_t kCapacity = 2048;

  /// The call of `prim` by `kernel` on `in` under the settings of the calling thread, as plan_call
  /// makes it. A kernel that does not keep plans is planned each time. Throws what `infer` and
  /// `plan` throw, and then keeps nothing.
  KernelCall plan(const PrimRef& prim, const Kernel& kernel, std::span<const Tensor> in) {
    return kernel.keeps_plan ? find(prim, kernel, in) : plan_call(*prim, kernel, in);
  }
  /// The same through of_thread(), which is looked up only for a kernel that keeps its plans.
  static KernelCall plan_for_thread(const PrimRef& prim, const Kernel& kernel,
                                    std::span<const Tensor> in) {
    return kernel.keeps_plan ? of_thread().find(prim, kernel, in) : plan_call(*prim, kernel, in);
  }
  size_t size() const { return entries_.size(); }

  /// The cache of the calling thread; it is destroyed with the thread.
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
