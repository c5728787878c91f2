// An op on cards whose kernel does what a test wants of it, beside copying its operand.
#pragma once
#include <functional>
#include <string_view>

#include "core/dispatch/dispatch.h"
#include "core/dispatch/kernel.h"
#include "core/ops/compose.h"
#include "core/tensor/device_runtime.h"

namespace tessera::test {

/// x [..] -> its copy. Its kernel calls when_run() with the stream, behind the copy, while it runs
/// and while it is captured.
class OpOnCard final : public Primitive {
 public:
  static inline const OpInfo kOp{"op_on_card", {OpKind::kOther, Precision::kAsGiven, 1}};
  /// The same, with a kernel that says that it cannot be captured, so that it divides graphs.
  static inline const OpInfo kDivides{"op_between_graphs",
                                      {OpKind::kOther, Precision::kAsGiven, 1}};
  explicit OpOnCard(const OpInfo& op) : Primitive(op) {}

  Metas infer(MetaSpan in) const override {
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }

  using WhenRun = std::function<void(const Stream&)>;
  /// To be set while no kernel runs.
  static WhenRun& when_run() {
    static WhenRun f;
    return f;
  }
  /// Registers the kernels for cards, once.
  static void add() {
    [[maybe_unused]] static const bool added = [] {
      add_kernels([](KernelTable& table) {
        const DeviceKind cuda = *find_device_kind("cuda");
        table.add(cuda, kOp.name, {.plan = plan, .run = run});
        table.add(cuda, kDivides.name, {.plan = plan, .run = run, .uncapturable = true});
      });
      return true;
    }();
  }

 private:
  static void plan(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
    plan.all_dense = true;
  }
  static void run(const Primitive& op, std::span<const Tensor> in, std::span<const Tensor> out,
                  Workspace, const Stream& stream) {
    const Device d = stream.device;
    runtime_of(d).copy(out[0].device_data(), d, in[0].device_data(), d, in[0].nbytes(), stream);
    if (op.id() == op_id() && when_run()) when_run()(stream);
  }
  static OpId op_id() {
    static const OpId id = OpOnCard(kOp).id();
    return id;
  }
};

inline Tensor op_on_card(const Tensor& x) {
  return dispatch1(PrimRef(new OpOnCard(OpOnCard::kOp)), operands(x));
}
inline Tensor op_between_graphs(const Tensor& x) {
  return dispatch1(PrimRef(new OpOnCard(OpOnCard::kDivides)), operands(x));
}

}  // namespace tessera::test
