#include "core/ops/conv_grad_norm.h"

#include <algorithm>

#include "core/dispatch/dispatch.h"
#include "core/ops/batch_norm_stats.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/register.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/ops/whole_axes.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

class ConvGradNorm final : public PrimitiveOf<ConvGradNorm, ConvNormAttributes> {
 public:
  static inline const OpInfo kOp{"conv_grad_norm", {OpKind::kOther, Precision::kAsGiven, 5}};
  explicit ConvGradNorm(const ConvNormAttributes& given)
      : PrimitiveOf(kOp, given),
        grad_(conv_grad_input_op(given.conv)),
        stats_(batch_norm_grad_stats_op(given.norm.form.relu)),
        apply_(batch_norm_grad_apply_op({given.norm.eps, {}})) {}
  static void check_attributes(const ConvNormAttributes& a) { check_conv_grad_input(a.conv); }
  int64_t operand_count() const override { return 5 + norm.form.relu + norm.form.residual; }
  double flops(MetaSpan in, std::span<const Meta> out) const override {
    return grad_->flops(in.first(2), out.first(1));
  }
  Metas infer(MetaSpan in) const override {
    Metas out = grad_->infer(in.first(2));
    const Meta h = out[0];
    SmallVector<const Meta*, 4> summed{&h, in[2], in[3]};
    if (norm.form.relu) summed.push_back(in[5]);
    for (const Meta& m : stats_->infer(summed)) out.push_back(m);
    const Meta g = out[1], gx = out[2];
    const Meta* applied[] = {&h, in[2], in[3], in[4], &g, &gx};
    apply_->infer(applied);  // checks var
    if (norm.form.residual)
      TESSERA_CHECK_AS(ShapeError, in.back()->shape == h.shape && in.back()->dtype == h.dtype,
                       "conv_grad_norm: the other gradient is {}{} beside {}{}; expected one type",
                       name_of(in.back()->dtype), to_string(in.back()->shape), name_of(h.dtype),
                       to_string(h.shape));
    for (int i = 0; i < int(norm.form.weight) + int(norm.form.bias); ++i) out.push_back(g);
    return out;
  }
  // Sums are of all of h.
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = grad_->axes(in.first(2));
    keep_whole(m);
    const OperandLoops h = m.out[0], channel{h[1]};
    m.in.push_back(h), m.in.push_back(channel), m.in.push_back(channel);
    while (m.in.size() < in.size()) m.in.push_back(h);
    for (int i = 0; i < 2 + int(norm.form.weight) + int(norm.form.bias); ++i)
      m.out.push_back(channel);
    return m;
  }
  bool differentiable() const override { return false; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    const Tensor &x = in[2], &mean = in[3], &var = in[4];
    Tensor h = dispatch1(grad_, operands(Tensor(in[0]), Tensor(in[1])));
    if (norm.form.residual) h = h + in.back();
    if (norm.form.relu) h = where(gt(in[5], 0), h, zeros_like(h));
    const ChannelSums of = batch_norm_grad_stats(h, x, mean);
    const double values = double(std::max<int64_t>(h.numel() / std::max<int64_t>(h.size(1), 1), 1));
    // infer() says dense; kernels of convolutions choose.
    Tensors out{contiguous(h), of.g / values, of.gx / values};
    if (norm.form.weight) out.push_back(of.gx * rsqrt(cast(var, of.gx.dtype()) + norm.eps));
    if (norm.form.bias) out.push_back(of.g);
    return out;
  }

 private:
  const PrimRef grad_, stats_, apply_;
};

}  // namespace

PrimRef conv_grad_norm_op(const ConvNormAttributes& attributes) {
  return PrimRef(new ConvGradNorm(attributes));
}

void register_conv_grad_norm_ops(OpRegistry& registry) {
  registry.add("conv_grad_norm", [] {
    const auto sample = [](const ConvAttributes& conv, const BatchNormForm& form, const Shape& g,
                           const Shape& w, const Shape& x) {
      const Shape channels{x[1]};
      Sample s{conv_grad_norm_op({conv, {1e-5, form}}),
               {sample_values(g, -1, 1, 1), sample_values(w, -1, 1, 2), sample_values(x, -2, 2, 3),
                sample_values(channels, -1, 1, 4), sample_values(channels, 0.5, 2, 5)}};
      if (form.relu) s.in.push_back(sample_values(x, -1, 1, 6));
      if (form.residual) s.in.push_back(sample_values(x, -1, 1, 7));
      return s;
    };
    const BatchNormForm all{true, true, true, true};
    return std::vector<Sample>{
        sample({{{1, 1}, {1, 1}, {0, 0}, {0, 0}, 1}, {4, 5}}, all, {2, 4, 3, 4}, {4, 3, 2, 2},
               {2, 3, 4, 5}),
        sample({{{2, 1}, {1, 2}, {1, 0}, {0, 1}, 2}, {5, 4}}, {.bias = true, .residual = true},
               {2, 4, 2, 3}, {4, 2, 3, 2}, {2, 4, 5, 4}),
        sample({{{1}, {1}, {1}, {1}, 1}, {5}}, {.weight = true, .relu = true}, {3, 3, 5}, {3, 2, 3},
               {3, 2, 5}),
        sample({{{1, 1, 1}, {1, 1, 1}, {1, 0, 0}, {1, 0, 0}, 1}, {3, 3, 2}}, {}, {2, 3, 3, 2, 2},
               {3, 2, 3, 2, 1}, {2, 2, 3, 3, 2})};
  });
}

}  // namespace tessera
