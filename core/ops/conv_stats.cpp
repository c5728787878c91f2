#include "core/ops/conv_stats.h"

#include "core/dispatch/dispatch.h"
#include "core/ops/batch_norm_stats.h"
#include "core/ops/register.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/ops/whole_axes.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

class ConvStats final : public PrimitiveOf<ConvStats, ConvAttributes> {
 public:
  static inline const OpInfo kOp{"conv_stats", {OpKind::kProduct, Precision::kLow, 2}};
  explicit ConvStats(const ConvAttributes& given)
      : PrimitiveOf(kOp, given), conv_(conv_op(given)) {}
  static void check_attributes(const ConvAttributes& a) { check_conv(a); }
  double flops(MetaSpan in, std::span<const Meta> out) const override {
    return conv_->flops(in, out.first(1));
  }
  Metas infer(MetaSpan in) const override {
    Metas out = conv_->infer(in);
    const Meta& y = out[0];
    const Meta channel = Meta::contiguous({y.shape[1]}, y.dtype == kF64 ? kF64 : kF32, y.device);
    out.push_back(channel), out.push_back(channel);
    return out;
  }
  // Moments are of all of y.
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = conv_->axes(in);
    keep_whole(m);
    const OperandLoops channel{m.out[0][1]};
    m.out.push_back(channel), m.out.push_back(channel);
    return m;
  }
  SaveMask saved() const override { return {3, 0}; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    // infer() says dense; kernels of convolutions choose.
    const Tensor y = contiguous(dispatch1(conv_, operands(Tensor(in[0]), Tensor(in[1]))));
    const ChannelMoments of = batch_norm_stats(y);
    return {y, of.mean, of.var};
  }
  Tensors vjp(const VjpArgs& v) const override { return vjp_by_decomposition(*this, v); }

 private:
  const PrimRef conv_;
};

}  // namespace

PrimRef conv_stats_op(const ConvAttributes& attributes) {
  return PrimRef(new ConvStats(attributes));
}

void register_conv_stats_ops(OpRegistry& registry) {
  registry.add("conv_stats", [] {
    const auto sample = [](const ConvAttributes::Window& window, const Shape& x, const Shape& w) {
      return Sample{conv_stats_op({window}),
                    {sample_values(x, -1, 1, 1), sample_values(w, -1, 1, 2)}};
    };
    return std::vector<Sample>{
        sample({{1, 1}, {1, 1}, {0, 0}, {0, 0}, 1}, {2, 3, 4, 5}, {4, 3, 2, 2}),
        sample({{2, 1}, {1, 2}, {1, 0}, {0, 1}, 2}, {2, 4, 5, 4}, {4, 2, 3, 2}),
        sample({{1}, {1}, {1}, {1}, 1}, {3, 2, 5}, {3, 2, 3})};
  });
}

}  // namespace tessera
