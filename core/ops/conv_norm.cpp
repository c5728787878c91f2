#include "core/ops/conv_norm.h"

#include "core/dispatch/dispatch.h"
#include "core/ops/batch_norm_stats.h"
#include "core/ops/conv_stats.h"
#include "core/ops/register.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/ops/whole_axes.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

class ConvNorm final : public PrimitiveOf<ConvNorm, ConvNormAttributes> {
 public:
  static inline const OpInfo kOp{"conv_norm", {OpKind::kOther, Precision::kAsGiven, 4}};
  explicit ConvNorm(const ConvNormAttributes& given)
      : PrimitiveOf(kOp, given),
        conv_(conv_op(given.conv)),
        norm_(batch_norm_apply_op(given.norm)) {}
  static void check_attributes(const ConvNormAttributes& a) { check_conv(a.conv); }
  int64_t operand_count() const override { return 1 + norm_->operand_count(); }
  double flops(MetaSpan in, std::span<const Meta> out) const override {
    return conv_->flops(in.first(2), out);
  }
  Metas infer(MetaSpan in) const override {
    const Metas y = conv_->infer(in.first(2));
    return norm_->infer(of_norm(y[0], in));
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = conv_->axes(in.first(2));
    keep_sums_whole(m);
    const size_t channels = in.size() - norm.form.residual;
    while (m.in.size() < channels) m.in.push_back({m.out[0][1]});
    if (norm.form.residual) m.in.push_back(m.out[0]);
    return m;
  }
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const override {
    const PrimRef local = conv_->localize(map, loops);
    return local ? conv_norm_op({attributes_of<ConvAttributes>(*local), norm}) : nullptr;
  }
  bool differentiable() const override { return false; }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    Tensors of{dispatch1(conv_, operands(Tensor(in[0]), Tensor(in[1])))};
    for (const Tensor& t : in.subspan(2)) of.push_back(t);
    return {contiguous(dispatch(norm_, of)[0])};  // infer() says dense; kernels choose
  }

 private:
  // Operands of the norm, of which y is the first.
  static SmallVector<const Meta*, 8> of_norm(const Meta& y, MetaSpan in) {
    SmallVector<const Meta*, 8> all{&y};
    for (const Meta* m : in.subspan(2)) all.push_back(m);
    return all;
  }
  const PrimRef conv_, norm_;
};

}  // namespace

PrimRef conv_norm_op(const ConvNormAttributes& attributes) {
  return PrimRef(new ConvNorm(attributes));
}

void register_conv_norm_ops(OpRegistry& registry) {
  registry.add("conv_norm", [] {
    const auto sample = [](const ConvAttributes::Window& window, const BatchNormForm& form,
                           const Shape& x, const Shape& w, const Shape& y) {
      Sample s{conv_norm_op({{window}, {1e-5, form}}),
               {sample_values(x, -1, 1, 1), sample_values(w, -1, 1, 2)}};
      const auto add = [&](const Shape& shape, double from) {
        s.in.push_back(sample_values(shape, from, 2, s.in.size() + 1));
      };
      add({w[0]}, -1), add({w[0]}, 0.5);
      if (form.weight) add({w[0]}, 0.5);
      if (form.bias) add({w[0]}, -1);
      if (form.residual) add(y, -2);
      return s;
    };
    return std::vector<Sample>{
        sample({{1, 1}, {1, 1}, {0, 0}, {0, 0}, 1}, {true, true, true, true}, {2, 3, 4, 5},
               {4, 3, 2, 2}, {2, 4, 3, 4}),
        sample({{2, 1}, {1, 2}, {1, 0}, {0, 1}, 2}, {.bias = true, .residual = true}, {2, 4, 5, 4},
               {4, 2, 3, 2}, {2, 4, 2, 3}),
        sample({{1}, {1}, {1}, {1}, 1}, {.weight = true, .relu = true}, {3, 2, 5}, {3, 2, 3}, {}),
        sample({{1, 1, 1}, {1, 1, 1}, {1, 0, 0}, {1, 0, 0}, 1}, {}, {2, 2, 3, 3, 2},
               {3, 2, 3, 2, 1}, {})};
  });
}

}  // namespace tessera
