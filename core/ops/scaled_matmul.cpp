#include "core/ops/scaled_matmul.h"

#include "core/dispatch/dispatch.h"
#include "core/ops/contract_epilogues.h"
#include "core/ops/pointwise.h"
#include "core/ops/register.h"
#include "core/ops/samples.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

struct ScaledMatmulAttributes {
  DType out = kBF16;
  bool bias = false;  // operand 4
  static void fields(auto& a, auto& f) { f("out", a.out), f("bias", a.bias); }
};

bool is_result(DType t) { return t == kF32 || t == kBF16 || t == kF16; }

class ScaledMatmul final : public PrimitiveOf<ScaledMatmul, ScaledMatmulAttributes> {
 public:
  static inline const OpInfo kOp{"scaled_matmul",
                                 {.kind = OpKind::kProduct,
                                  .precision = Precision::kAsGiven,
                                  .operands = 4,
                                  .takes_storage = true}};
  using PrimitiveOf::PrimitiveOf;
  static void check_attributes(const ScaledMatmulAttributes& a) {
    TESSERA_CHECK(is_result(a.out), "scaled_matmul: out={}; expected f32, bf16 or f16",
                  name_of(a.out));
  }
  int64_t operand_count() const override { return 4 + bias; }
  double flops(MetaSpan in, std::span<const Meta>) const override {
    return 2.0 * double(in[0]->shape[0]) * double(in[0]->shape[1]) * double(in[1]->shape[0]);
  }
  Metas infer(MetaSpan in) const override {
    TESSERA_CHECK(int64_t(in.size()) == operand_count(),
                  "scaled_matmul: {} operands; expected a, b and their scales{}", in.size(),
                  bias ? " and a bias" : "");
    const Meta &a = *in[0], &b = *in[1];
    TESSERA_CHECK(is_storage_only(a.dtype) && is_storage_only(b.dtype) &&
                      !(a.dtype == kF8E5M2 && b.dtype == kF8E5M2),
                  "scaled_matmul: operands are {}; expected a and b of f8e4m3, or one of them of "
                  "f8e5m2",
                  describe(in));
    TESSERA_CHECK_AS(
        ShapeError, a.shape.size() == 2 && b.shape.size() == 2 && a.shape[1] == b.shape[1],
        "scaled_matmul: operands are {}; expected a [M, K] and b [N, K]", describe(in));
    for (const Meta* scale : in.subspan(2, 2))
      TESSERA_CHECK_AS(ShapeError, scale->shape.empty() && is_differentiable(scale->dtype),
                       "scaled_matmul: operands are {}; expected scales that are one float each",
                       describe(in));
    if (bias)
      TESSERA_CHECK_AS(
          ShapeError, in[4]->shape == Shape{b.shape[0]} && is_differentiable(in[4]->dtype),
          "scaled_matmul: operands are {}; expected a bias of {} floats", describe(in), b.shape[0]);
    return {Meta::contiguous({a.shape[0], b.shape[0]}, out, a.device)};
  }
  PrimRef with_bias() const { return bias ? nullptr : PrimRef(new ScaledMatmul({out, true})); }
  // Ranks with terms of a sum would each add the bias.
  AxisMap axes(MetaSpan in) const override {
    AxisMap m;
    const int rows = m.add(Factor::kPass, in[0]->shape[0]),
              columns = m.add(Factor::kPass, in[1]->shape[0]),
              summed = m.add(bias ? Factor::kWhole : Factor::kSum, in[0]->shape[1]);
    m.in = {{{rows}, {summed}}, {{columns}, {summed}}, {}, {}};
    if (bias) m.in.push_back({{columns}});
    m.out = {{{rows}, {columns}}};
    return m;
  }
  bool decomposable() const override { return true; }
  Tensors decompose(std::span<const Tensor> in) const override {
    // CPUs have no kernel, so that nothing else checks the operands there.
    SmallVector<const Meta*, 5> types;
    for (const Tensor& t : in) types.push_back(&t.meta());
    infer(types);
    ContractAttributes rows;
    rows.parse("mk,nk->mn");
    Tensor y = dispatch1(contract_op(rows), operands(cast(in[0], kF32), cast(in[1], kF32)));
    y = y * cast(in[2], kF32) * cast(in[3], kF32);
    return {cast(bias ? y + cast(cast(in[4], out), kF32) : y, out)};
  }
};

}  // namespace

Tensor scaled_matmul(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                     DType out, const Tensor& bias) {
  const ScaledMatmulAttributes attributes{out, bias.defined()};
  ScaledMatmul::check_attributes(attributes);
  Tensor in[] = {a, b, scale_a, scale_b, bias};
  return dispatch1(PrimRef(new ScaledMatmul(attributes)), Inputs(in, bias.defined() ? 5 : 4));
}

PrimRef scaled_matmul_with_bias(const Primitive& prim) {
  const auto* product = dynamic_cast<const ScaledMatmul*>(&prim);
  return product ? product->with_bias() : nullptr;
}

void register_scaled_matmul_ops(OpRegistry& registry) {
  registry.add("scaled_matmul", [] {
    const auto sample = [](DType a, DType b, DType out, int64_t m, int64_t n, int64_t k,
                           bool bias) {
      Sample s{
          PrimRef(new ScaledMatmul({out, bias})),
          {cast(sample_values({m, k}, -8, 8, 1), a), cast(sample_values({n, k}, -8, 8, 2), b),
           cast(sample_values({}, 0.5, 2, 3), kF32), cast(sample_values({}, 0.5, 2, 4), kF32)}};
      if (bias) s.in.push_back(cast(sample_values({n}, -1, 1, 5), out));
      s.smooth = false;
      return s;
    };
    return std::vector<Sample>{sample(kF8E4M3, kF8E4M3, kF32, 3, 5, 4, false),
                               sample(kF8E5M2, kF8E4M3, kF32, 4, 2, 3, true),
                               sample(kF8E4M3, kF8E5M2, kBF16, 2, 32, 16, true),
                               sample(kF8E4M3, kF8E4M3, kF16, 5, 16, 32, false)};
  });
}

}  // namespace tessera
