#include "core/ops/contract_bias.h"

#include "core/ops/contract.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

class ContractBias final : public PrimitiveOf<ContractBias, ContractAttributes> {
 public:
  static inline const OpInfo kOp{"contract_bias",
                                 {.kind = OpKind::kProduct,
                                  .precision = Precision::kLow,
                                  .operands = 3,
                                  .promotion = Promotion::kAll}};
  explicit ContractBias(const ContractAttributes& given)
      : PrimitiveOf(kOp, given), product_(contract_op(given)) {}
  static void check_attributes(const ContractAttributes& c) {
    TESSERA_CHECK(may_add_bias(c), "contract_bias: spec \"{}\" with {} leaves takes no bias",
                  c.spec(), c.leaves);
  }
  double flops(MetaSpan in, std::span<const Meta>) const override {
    return product_->flops(in.first(2), {});
  }
  Metas infer(MetaSpan in) const override {
    Metas m = product_->infer(in.first(2));
    TESSERA_CHECK_AS(ShapeError,
                     in[2]->shape == Shape{m[0].shape.back()} && in[2]->dtype == m[0].dtype,
                     "contract_bias {}: operands are {}", spec(), describe(in));
    return m;
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m = product_->axes(in.first(2));
    // Ranks with terms of a sum would each add the bias.
    for (Factor& f : m.factors)
      if (f.kind == Factor::kSum) f.kind = Factor::kWhole;
    m.linear_in = 0;
    m.in.push_back({m.out[0].back()});
    return m;
  }
  SaveMask saved() const override { return {3, 0}; }
  Tensors vjp(const VjpArgs& v) const override {
    VjpArgs product = v;
    product.in = v.in.first(2);
    Tensors g = product_->vjp(product);
    Dims dims;
    for (int64_t d = 0; d + 1 < v.cot[0].ndim(); ++d) dims.push_back(d);
    g.push_back(!v.wants(2) ? Tensor() : dims.empty() ? v.cot[0] : sum(v.cot[0], dims));
    return g;
  }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    return {add(contract(spec(), in[0], in[1]), in[2])};
  }

 private:
  const PrimRef product_;
};

}  // namespace

bool may_add_bias(const ContractAttributes& c) {
  return c.leaves == 0 && !c.out.empty() && c.a.find(c.out.back()) == std::string::npos;
}
PrimRef contract_bias_op(const ContractAttributes& c) {
  ContractBias::check_attributes(c);
  return PrimRef(new ContractBias(c));
}

void register_contract_bias_ops(OpRegistry& registry) {
  registry.add("contract_bias", [] {
    const auto sample = [](const char* spec, const Shape& a, const Shape& b) {
      ContractAttributes c;
      c.parse(spec);
      return Sample{contract_bias_op(c),
                    {sample_values(a, -1, 1, 1), sample_values(b, -1, 1, 2),
                     sample_values({b[0]}, -1, 1, 3)}};
    };
    return std::vector<Sample>{sample("k,nk->n", {4}, {5, 4}), sample("ak,nk->an", {3, 4}, {2, 4}),
                               sample("btk,nk->btn", {2, 3, 4}, {5, 4})};
  });
}

}  // namespace tessera
