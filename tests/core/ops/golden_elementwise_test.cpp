// Golden cases of elementwise operations, casts, activations and losses.
#include <gtest/gtest.h>

#include "core/ops/compose.h"
#include "core/ops/losses.h"
#include "core/ops/pointwise.h"
#include "tests/core/ops/golden.h"

namespace tessera::golden {
namespace {

using C = const Case&;
using One = Tensor (*)(Tensor);
using Two = Tensor (*)(Tensor, Tensor);

Call one(One f) {
  return [f](C c) { return std::vector<Tensor>{f(c.in.begin()->second)}; };
}
Call one(Tensor (*f)(const Tensor&)) {
  return [f](C c) { return std::vector<Tensor>{f(c.in.begin()->second)}; };
}
// Operands in alphabetical order: (a, b) or (x, y).
Call two(Two f) {
  return [f](C c) {
    return std::vector<Tensor>{f(c.in.begin()->second, std::next(c.in.begin())->second)};
  };
}
Call two(Tensor (*f)(const Tensor&, const Tensor&)) {
  return [f](C c) {
    return std::vector<Tensor>{f(c.in.begin()->second, std::next(c.in.begin())->second)};
  };
}
Call just(Tensor (*f)(C)) {
  return [f](C c) { return std::vector<Tensor>{f(c)}; };
}

DType dtype_named(const std::string& name) {
  for (DType t : kAllDTypes)
    if (name_of(t) == name) return t;
  throw UserError("no dtype " + name);
}
Reduction reduction(C c) {
  std::string r = c.text("reduction");
  return r == "mean" ? Reduction::kMean : r == "sum" ? Reduction::kSum : Reduction::kNone;
}

Tensor power(C c) {
  if (c.variant() == "scalar_base") return pow(scalar_tensor(2, kI64), c["b"]);
  if (!c.entry["attributes"].contains("exponent")) return pow(c["a"], c["b"]);
  const auto& e = c.entry["attributes"]["exponent"];
  return e.is_number_integer() ? pow(c["a"], e.get<int64_t>()) : pow(c["a"], e.get<double>());
}
Tensor clamped(C c) {
  if (c.has("low")) return clamp(c["x"], c["low"], c["high"]);
  if (c.variant() == "min_only") return clamp_min(c["x"], c.real("min"));
  if (c.variant() == "max_only") return clamp_max(c["x"], c.real("max"));
  if (c.variant() == "integers") return clamp(c["x"], c.integer("min"), c.integer("max"));
  return clamp(c["x"], c.real("min"), c.real("max"));
}
Tensor divided(C c) {
  if (c.variant().starts_with("trunc")) return div_trunc(c["a"], c["b"]);
  return c.variant() == "floor" ? floor_divide(c["a"], c["b"]) : div(c["a"], c["b"]);
}
Tensor nll(C c) { return nll_loss(c["x"], c["target"], {.weight = c["weight"]}); }
Tensor kl(C c) {
  std::string r = c.text("reduction");
  return kl_div(log_softmax(c["x"], 1), c["target"],
                r == "mean"        ? KlReduction::kMean
                : r == "batchmean" ? KlReduction::kBatchMean
                : r == "sum"       ? KlReduction::kSum
                                   : KlReduction::kNone);
}

}  // namespace

const Table& elementwise_table() {
  static const Table table = {
      {"round", just([](C c) {
         return c.variant() == "edges" ? round(c["x"]) : round(c["x"], c.integer("decimals"));
       })},
      {"trunc", one(trunc)},
      {"floor", one(floor)},
      {"ceil", one(ceil)},
      {"frac", one(frac)},
      {"sign", one(sign)},
      {"signbit", one(signbit)},
      {"isnan", one(isnan)},
      {"isinf", one(isinf)},
      {"isfinite", one(isfinite)},
      {"copysign", two(copysign)},
      {"fmod", two(fmod)},
      {"remainder", two(remainder)},
      {"floor_divide", two(floor_divide)},
      {"true_divide", two(div)},
      {"div", just(divided)},
      {"sub", two(sub)},
      {"mul", two(mul)},
      {"neg", one(neg)},
      {"add", just([](C c) {
         return c.variant() == "alpha" ? add(c["a"], c["b"], c.real("alpha")) : add(c["a"], c["b"]);
       })},
      {"pow", just(power)},
      {"clamp", just(clamped)},
      {"maximum", two(maximum)},
      {"minimum", two(minimum)},
      {"fmax", two(fmax)},
      {"fmin", two(fmin)},
      {"nan_to_num", just([](C c) {
         return c.variant() == "default" ? nan_to_num(c["x"]) : nan_to_num(c["x"], 7, 9, -9);
       })},
      {"isclose",
       just([](C c) { return isclose(c["a"], c["b"], 1e-5, 1e-8, c.variant() == "equal_nan"); })},
      {"eq", two(eq)},
      {"ne", two(ne)},
      {"lt", two(lt)},
      {"le", two(le)},
      {"gt", two(gt)},
      {"ge", two(ge)},
      {"logical_and", two(logical_and)},
      {"logical_or", two(logical_or)},
      {"logical_xor", two(logical_xor)},
      {"logical_not", one(logical_not)},
      {"bitwise_and", two(bitwise_and)},
      {"bitwise_or", two(bitwise_or)},
      {"bitwise_xor", two(bitwise_xor)},
      {"bitwise_left_shift", two(bitwise_left_shift)},
      {"bitwise_right_shift", two(bitwise_right_shift)},
      {"bitwise_not", one(bitwise_not)},
      {"to", just([](C c) { return cast(c["x"], dtype_named(c.text("dtype"))); })},
      {"exp", one(exp)},
      {"expm1", one(expm1)},
      {"sin", one(sin)},
      {"cos", one(cos)},
      {"tan", one(tan)},
      {"tanh", one(tanh)},
      {"sinh", one(sinh)},
      {"cosh", one(cosh)},
      {"asinh", one(asinh)},
      {"atan", one(atan)},
      {"erf", one(erf)},
      {"erfc", one(erfc)},
      {"sigmoid", one(sigmoid)},
      {"square", one(square)},
      {"abs", one(abs)},
      {"relu", one(relu)},
      {"exp2", one(exp2)},
      {"sinc", one(sinc)},
      {"log", one(log)},
      {"log2", one(log2)},
      {"log10", one(log10)},
      {"log1p", one(log1p)},
      {"sqrt", one(sqrt)},
      {"rsqrt", one(rsqrt)},
      {"reciprocal", one(reciprocal)},
      {"asin", one(asin)},
      {"acos", one(acos)},
      {"atanh", one(atanh)},
      {"logit", one(logit)},
      {"lgamma", one(lgamma)},
      {"digamma", one(digamma)},
      {"erfinv", one(erfinv)},
      {"silu", one(silu)},
      {"mish", one(mish)},
      {"relu6", one(relu6)},
      {"selu", one(selu)},
      {"elu", just([](C c) { return elu(c["x"], 0.7); })},
      {"celu", just([](C c) { return celu(c["x"], 0.7); })},
      {"leaky_relu", just([](C c) { return leaky_relu(c["x"], 0.1); })},
      {"softplus", just([](C c) { return softplus(c["x"], 2.0, 5.0); })},
      {"softsign", one(softsign)},
      {"hardtanh", just([](C c) { return hardtanh(c["x"]); })},
      {"hardsigmoid", one(hardsigmoid)},
      {"hardswish", one(hardswish)},
      {"logsigmoid", one(logsigmoid)},
      {"tanhshrink", one(tanhshrink)},
      {"softshrink", just([](C c) { return softshrink(c["x"]); })},
      {"hardshrink", just([](C c) { return hardshrink(c["x"]); })},
      {"threshold", just([](C c) { return threshold(c["x"], 0.5, -2.0); })},
      {"gelu", one(gelu)},
      {"gelu_tanh", one(gelu_tanh)},
      {"glu", just([](C c) { return glu(c["x"], 1); })},
      {"prelu", just([](C c) { return prelu(c["x"], c["weight"]); })},
      {"atan2", two(atan2)},
      {"hypot", two(hypot)},
      {"logaddexp", two(logaddexp)},
      {"logaddexp2", two(logaddexp2)},
      {"xlogy", two(xlogy)},
      {"lerp", just([](C c) { return lerp(c["a"], c["b"], c["w"]); })},
      {"addcmul", just([](C c) { return addcmul(c["a"], c["b"], c["c"], 0.5); })},
      {"addcdiv", just([](C c) { return addcdiv(c["a"], c["b"], c["c"], 0.5); })},
      {"mse_loss", just([](C c) { return mse_loss(c["x"], c["y"], reduction(c)); })},
      {"l1_loss", just([](C c) { return l1_loss(c["x"], c["y"], reduction(c)); })},
      {"smooth_l1_loss",
       just([](C c) { return smooth_l1_loss(c["x"], c["y"], 0.7, reduction(c)); })},
      {"huber_loss", just([](C c) { return huber_loss(c["x"], c["y"], 0.7, reduction(c)); })},
      {"binary_cross_entropy", just([](C c) {
         return binary_cross_entropy(c["x"], c["y"], {},
                                     c.variant() == "ends" ? Reduction::kNone : Reduction::kMean);
       })},
      {"binary_cross_entropy_with_logits", just([](C c) {
         return binary_cross_entropy_with_logits(c["x"], c["y"], c["weight"], c["pos_weight"]);
       })},
      {"nll_loss", just(nll)},
      {"kl_div", just(kl)},
      {"normalize", just([](C c) { return normalize(c["x"], 2, 1); })},
      {"cosine_similarity", just([](C c) { return cosine_similarity(c["a"], c["b"], 1); })},
  };
  return table;
}

TEST(Golden, Elementwise) { check_all(elementwise_table()); }

}  // namespace tessera::golden
