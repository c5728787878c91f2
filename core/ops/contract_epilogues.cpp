#include "core/ops/contract_epilogues.h"

#include <algorithm>

#include "core/dispatch/dispatch.h"
#include "core/ops/contract.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/whole_axes.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

bool has(const std::string& word, char letter) { return word.find(letter) != std::string::npos; }

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
    keep_sums_whole(m);
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

constexpr OpTraits behind_autograd(int operands) {
  return {.kind = OpKind::kOther, .precision = Precision::kAsGiven, .operands = operands};
}

void check_gelu(const OpInfo& op, const ContractAttributes& c) {
  TESSERA_CHECK(may_join_gelu(c), "{}: spec \"{}\" with {} leaves takes no GELU", op.name, c.spec(),
                c.leaves);
}
void check_wide(const OpInfo& op, const ContractAttributes& c) {
  TESSERA_CHECK(may_be_wide(c), "{}: spec \"{}\" with {} leaves; expected 0", op.name, c.spec(),
                c.leaves);
}

/// An op that the compiler alone makes, of a product and other ops.
template <class Self, class A>
class Joined : public PrimitiveOf<Self, A> {
 public:
  explicit Joined(const A& given)
      : PrimitiveOf<Self, A>(Self::kOp, given), product_(contract_op(given)) {}
  double flops(MetaSpan in, std::span<const Meta>) const override {
    return product_->flops(in.first(2), {});
  }
  bool differentiable() const override { return false; }
  bool decomposable() const override { return true; }

 protected:
  Meta product_of(MetaSpan in) const { return product_->infer(in.first(2))[0]; }
  // What becomes of a product is computed before it is rounded to 16 bits.
  static Tensor wide(const Tensor& t) { return cast(t, t.dtype() == kF64 ? kF64 : kF32); }
  Tensor wide_product(std::span<const Tensor> in) const {
    return contract(this->spec(), wide(in[0]), wide(in[1]));
  }

 private:
  const PrimRef product_;
};

class ContractGelu final : public Joined<ContractGelu, ContractAttributes> {
 public:
  static inline const OpInfo kOp{"contract_gelu", behind_autograd(3)};
  using Joined::Joined;
  static void check_attributes(const ContractAttributes& c) { check_gelu(kOp, c); }
  Metas infer(MetaSpan in) const override {
    const Meta m = product_of(in);
    TESSERA_CHECK_AS(
        ShapeError,
        is_floating(m.dtype) && in[2]->shape == Shape{m.shape.back()} && in[2]->dtype == m.dtype,
        "contract_gelu {}: operands are {}", spec(), describe(in));
    return {m, m};
  }
  Tensors decompose(std::span<const Tensor> in) const override {
    const Tensor x = add(wide_product(in), wide(in[2]));
    return {cast(gelu_tanh(x), in[0].dtype()), cast(x, in[0].dtype())};
  }
};

class ContractGeluGrad final : public Joined<ContractGeluGrad, ContractAttributes> {
 public:
  static inline const OpInfo kOp{"contract_gelu_grad", behind_autograd(3)};
  using Joined::Joined;
  static void check_attributes(const ContractAttributes& c) { check_gelu(kOp, c); }
  Metas infer(MetaSpan in) const override {
    const Meta m = product_of(in);
    TESSERA_CHECK_AS(ShapeError,
                     is_floating(m.dtype) && in[2]->shape == m.shape && in[2]->dtype == m.dtype,
                     "contract_gelu_grad {}: operands are {}", spec(), describe(in));
    Shape sums = m.shape;
    for (int d = 0; d + 1 < sums.size(); ++d) sums[d] = 1;
    return {m, Meta::contiguous(sums, m.dtype, m.device)};
  }
  Tensors decompose(std::span<const Tensor> in) const override {
    Tensor of[] = {wide_product(in), wide(in[2])};
    const Tensor g = dispatch1(pointwise_primitive("gelu_tanh_grad"), of);
    Dims rows;
    for (int64_t d = 0; d + 1 < g.ndim(); ++d) rows.push_back(d);
    return {cast(g, in[0].dtype()), cast(sum(g, rows, true), in[0].dtype())};
  }
};

class ContractSums final : public Joined<ContractSums, ContractSumsAttributes> {
 public:
  static inline const OpInfo kOp{"contract_sums", behind_autograd(2)};
  using Joined::Joined;
  static void check_attributes(const ContractSumsAttributes& c) {
    TESSERA_CHECK(may_sum_operand(c),
                  "contract_sums: spec \"{}\" with {} leaves sums no operand {}", c.spec(),
                  c.leaves, c.of_b ? "b" : "a");
  }
  Metas infer(MetaSpan in) const override {
    const Meta m = product_of(in);
    TESSERA_CHECK_AS(ShapeError, is_floating(m.dtype), "contract_sums {}: operands are {}", spec(),
                     describe(in));
    Shape sums = in[of_b]->shape;
    for (size_t d = 0; d < summed().size(); ++d)
      if (!has(out, summed()[d])) sums[int(d)] = 1;
    return {m, Meta::contiguous(sums, m.dtype, m.device)};
  }
  Tensors decompose(std::span<const Tensor> in) const override {
    Dims dims;
    for (size_t d = 0; d < summed().size(); ++d)
      if (!has(out, summed()[d])) dims.push_back(int64_t(d));
    return {contract(spec(), in[0], in[1]), sum(in[of_b], dims, true)};
  }
};

class ContractWide final : public Joined<ContractWide, ContractAttributes> {
 public:
  static inline const OpInfo kOp{"contract_wide", behind_autograd(2)};
  using Joined::Joined;
  static void check_attributes(const ContractAttributes& c) { check_wide(kOp, c); }
  Metas infer(MetaSpan in) const override {
    Meta m = product_of(in);
    TESSERA_CHECK_AS(ShapeError, is_floating(m.dtype), "contract_wide {}: operands are {}", spec(),
                     describe(in));
    m.dtype = m.dtype == kF64 ? kF64 : kF32;
    return {m};
  }
  Tensors decompose(std::span<const Tensor> in) const override { return {wide_product(in)}; }
};

class ContractAdd final : public Joined<ContractAdd, ContractAttributes> {
 public:
  static inline const OpInfo kOp{"contract_add", behind_autograd(3)};
  using Joined::Joined;
  static void check_attributes(const ContractAttributes& c) { check_wide(kOp, c); }
  Metas infer(MetaSpan in) const override {
    const Meta m = product_of(in);
    const DType t = in[2]->dtype;
    TESSERA_CHECK_AS(ShapeError,
                     is_floating(m.dtype) && in[2]->shape == m.shape &&
                         (t == m.dtype || (t == kF32 && size_of(m.dtype) == 2)),
                     "contract_add {}: operands are {}", spec(), describe(in));
    return {Meta::contiguous(m.shape, t, m.device)};
  }
  Tensors decompose(std::span<const Tensor> in) const override {
    return {cast(add(wide_product(in), wide(in[2])), in[2].dtype())};
  }
};

template <class Op, class A>
PrimRef checked(const A& attributes) {
  Op::check_attributes(attributes);
  return PrimRef(new Op(attributes));
}

}  // namespace

bool may_add_bias(const ContractAttributes& c) {
  return c.leaves == 0 && !c.out.empty() && !has(c.a, c.out.back());
}
bool may_join_gelu(const ContractAttributes& c) {
  const auto in_all = [&](char l) { return has(c.a, l) && has(c.b, l); };
  return may_add_bias(c) && c.out.size() > 1 && std::ranges::none_of(c.out, in_all);
}
bool may_sum_operand(const ContractSumsAttributes& c) {
  const auto kept = [&](char l) { return has(c.out, l); };
  const auto in_all = [&](char l) { return has(c.a, l) && has(c.b, l); };
  return c.leaves == 0 && std::ranges::none_of(c.out, in_all) &&
         std::ranges::count_if(c.summed(), kept) == 1 && c.summed().size() > 1;
}
bool may_be_wide(const ContractAttributes& c) { return c.leaves == 0; }
PrimRef contract_wide_op(const ContractAttributes& c) { return checked<ContractWide>(c); }
PrimRef contract_add_op(const ContractAttributes& c) { return checked<ContractAdd>(c); }
PrimRef contract_bias_op(const ContractAttributes& c) { return checked<ContractBias>(c); }
PrimRef contract_gelu_op(const ContractAttributes& c) { return checked<ContractGelu>(c); }
PrimRef contract_gelu_grad_op(const ContractAttributes& c) { return checked<ContractGeluGrad>(c); }
PrimRef contract_sums_op(const ContractSumsAttributes& c) { return checked<ContractSums>(c); }

namespace {

using Products = std::vector<std::pair<const char*, std::vector<Shape>>>;

// An op of products, each with the shapes of operands, whose values are drawn.
void add_products(OpRegistry& registry, const char* name,
                  PrimRef (*make)(const ContractAttributes&), const Products& products) {
  registry.add(name, [make, products] {
    std::vector<Sample> samples;
    for (const auto& [spec, shapes] : products) {
      ContractAttributes c;
      c.parse(spec);
      Sample s{make(c), {}};
      for (const Shape& shape : shapes)
        s.in.push_back(sample_values(shape, -1, 1, s.in.size() + 1));
      samples.push_back(std::move(s));
    }
    return samples;
  });
}

}  // namespace

void register_contract_epilogue_ops(OpRegistry& registry) {
  Products layers = {{"ak,nk->an", {{3, 4}, {2, 4}, {2}}},
                     {"btk,nk->btn", {{2, 3, 4}, {5, 4}, {5}}}};
  add_products(registry, "contract_gelu", contract_gelu_op, layers);
  layers.push_back({"k,nk->n", {{4}, {5, 4}, {5}}});
  add_products(registry, "contract_bias", contract_bias_op, layers);
  add_products(
      registry, "contract_gelu_grad", contract_gelu_grad_op,
      {{"an,nk->ak", {{3, 4}, {4, 2}, {3, 2}}}, {"btn,nk->btk", {{2, 3, 4}, {4, 5}, {2, 3, 5}}}});
  add_products(registry, "contract_wide", contract_wide_op,
               {{"ij,jk->ik", {{3, 4}, {4, 2}}}, {"btn,btk->nk", {{2, 3, 4}, {2, 3, 5}}}});
  add_products(registry, "contract_add", contract_add_op,
               {{"ij,jk->ik", {{3, 3}, {3, 3}, {3, 3}}},
                {"btn,btk->nk", {{2, 3, 4}, {2, 3, 5}, {4, 5}}},
                {"bij,bjk->bik", {{2, 3, 4}, {2, 4, 5}, {2, 3, 5}}}});
  add_products(registry, "contract_sums",
               [](const ContractAttributes& c) {
                 return contract_sums_op({c, /*of_b=*/has(c.b, 'n')});
               },
               {{"an,ak->nk", {{3, 4}, {3, 2}}},
                {"btn,btk->nk", {{2, 3, 4}, {2, 3, 5}}},
                {"btk,btn->kn", {{2, 3, 4}, {2, 3, 5}}}});
}

}  // namespace tessera
