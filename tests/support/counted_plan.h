// An op whose result is the number of the plan that computed it, counted by thread: shows which
// calls share a plan, and that a plan's state reaches the run.
#pragma once
#include "core/dispatch/dispatch.h"
#include "core/dispatch/kernel.h"

namespace tessera::test {

/// Plans that the calling thread made of these ops.
inline thread_local int64_t plans_made = 0;

/// Of one operand; the result is a 0-d i64. The plan is kept where `keeps`; a negative `attribute`
/// is refused by it.
class CountedPlan final : public Primitive {
 public:
  static constexpr OpTraits kTraits{OpKind::kOther, Precision::kAsGiven, 1};
  static inline const OpInfo kKept{"counted_plan", kTraits},
      kOfEachCall{"counted_plan_of_each_call", kTraits};
  CountedPlan(int64_t attribute, bool keeps)
      : Primitive(keeps ? kKept : kOfEachCall), attribute_(attribute), keeps_(keeps) {}
  Metas infer(MetaSpan in) const override { return {Meta::contiguous({}, kI64, in[0]->device)}; }
  void attributes(AttributeVisitor& v) const override { v.integer("attribute", attribute_); }
  const Kernel* own_kernel(DeviceKind) const override {
    static const Kernel kept{.plan = plan, .run = run, .keeps_plan = true},
        of_each_call{.plan = plan, .run = run};
    return keeps_ ? &kept : &of_each_call;
  }

 private:
  struct Number final : RefCounted {
    explicit Number(int64_t n) : value(n) {}
    const int64_t value;
  };
  static void plan(const Primitive& prim, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
    TESSERA_CHECK(static_cast<const CountedPlan&>(prim).attribute_ >= 0,
                  "counted_plan: attribute is negative");
    plan.state = make_ref<Number>(++plans_made);
  }
  static void run(const Primitive&, std::span<const Tensor>, std::span<const Tensor> out,
                  Workspace work, const Stream&) {
    *out[0].data<int64_t>() = work.planned<Number>().value;
  }

  const int64_t attribute_;
  const bool keeps_;
};

inline PrimRef counted_plan(int64_t attribute, bool keeps = true) {
  return PrimRef(new CountedPlan(attribute, keeps));
}

}  // namespace tessera::test
