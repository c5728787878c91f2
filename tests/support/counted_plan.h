// An op whose result is the number of the plan that computed it, counted by thread: shows which
// calls share a plan, and that a plan's state reaches the run.
#pragma once
#include "core/dispatch/dispatch.h"
#include "core/dispatch/kernel.h"
#include "core/primitive/primitive_of.h"

namespace tessera::test {

/// Plans that the calling thread made of these ops.
inline thread_local int64_t plans_made = 0;

struct CountedPlanAttributes {
  int64_t attribute = 0;
  static void fields(auto& a, auto& f) { f.any("attribute", a.attribute); }
};
/// Takes one operand; the result is a 0-d i64. The plan of kKept is kept; a negative `attribute` is
/// refused by it.
class CountedPlan final : public PrimitiveOf<CountedPlan, CountedPlanAttributes> {
 public:
  static constexpr OpTraits kTraits{OpKind::kOther, Precision::kAsGiven, 1};
  static inline const OpInfo kKept{"counted_plan", kTraits},
      kOfEachCall{"counted_plan_of_each_call", kTraits};
  using PrimitiveOf::PrimitiveOf;
  Metas infer(MetaSpan in) const override { return {Meta::contiguous({}, kI64, in[0]->device)}; }
  const Kernel* own_kernel(DeviceKind) const override {
    static const Kernel kept{.plan = plan, .run = run, .keeps_plan = true},
        of_each_call{.plan = plan, .run = run};
    return id() == kKept.id ? &kept : &of_each_call;
  }

 private:
  struct Number final : RefCounted {
    explicit Number(int64_t n) : value(n) {}
    const int64_t value;
  };
  static void plan(const Primitive& prim, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
    TESSERA_CHECK(static_cast<const CountedPlan&>(prim).attribute >= 0,
                  "counted_plan: attribute is negative");
    plan.state = make_ref<Number>(++plans_made);
  }
  static void run(const Primitive&, std::span<const Tensor>, std::span<const Tensor> out,
                  Workspace work, const Stream&) {
    *out[0].data<int64_t>() = work.planned<Number>().value;
  }
};

inline PrimRef counted_plan(int64_t attribute, bool keeps = true) {
  return PrimRef(
      new CountedPlan(keeps ? CountedPlan::kKept : CountedPlan::kOfEachCall, {attribute}));
}

}  // namespace tessera::test
