// Type promotion against PyTorch's whole table: result_type of every pair of dtypes in every
// category of operand, and the dtypes that operations give or refuse.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/scan.h"
#include "core/ops/sort.h"

namespace tessera {
namespace {

const nlohmann::json& table() {
  static const nlohmann::json* t = [] {
    const char* source = std::getenv("TESSERA_SOURCE");
    std::ifstream file(std::string(source ? source : ".") + "/tests/golden/type_promotion.json");
    return new nlohmann::json(nlohmann::json::parse(file));
  }();
  return *t;
}

Tensor operand(DType t, int ndim) { return ones(Dims::filled(ndim, 2), {.dtype = t}); }

TEST(Promotion, TwoTensors) {
  const std::map<std::string, std::pair<int, int>> categories = {
      {"dim_dim", {1, 1}}, {"dim_0d", {1, 0}}, {"0d_0d", {0, 0}}};
  const auto& all = table()["tensor_tensor"];
  ASSERT_EQ(all.size(), categories.size());
  for (auto& [category, dims] : categories)
    for (DType a : kComputedDTypes)
      for (DType b : kComputedDTypes) {
        std::string want = all[category][name_of(a)][name_of(b)];
        Tensor x = operand(a, dims.first), y = operand(b, dims.second);
        EXPECT_EQ(name_of(result_type(x, y)), want)
            << category << " " << name_of(a) << " " << name_of(b);
        EXPECT_EQ(name_of(result_type(y, x)), want) << category << ", the other way round";
      }
}

TEST(Promotion, TensorAndNumber) {
  const std::map<std::string, Scalar> numbers = {{"bool", true}, {"int", 1}, {"float", 1.0}};
  for (auto& [category, ndim] : std::map<std::string, int>{{"dim", 1}, {"0d", 0}})
    for (DType a : kComputedDTypes)
      for (auto& [kind, number] : numbers)
        EXPECT_EQ(name_of(result_type(operand(a, ndim), number)),
                  std::string(table()["tensor_scalar"][category][name_of(a)][kind]))
            << category << " " << name_of(a) << " " << kind;
}

// The dtype of f's result, or "error" where it refuses its operands.
std::string outcome(const std::function<Tensor()>& f) {
  try {
    return std::string(name_of(f().dtype()));
  } catch (const UserError&) {
    return "error";
  }
}

TEST(Promotion, UnaryOperations) {
  using F = std::function<Tensor(const Tensor&)>;
  const std::map<std::string, F> ops = {
      {"abs", abs},
      {"neg", neg},
      {"sign", sign},
      {"square", square},
      {"sqrt", sqrt},
      {"rsqrt", rsqrt},
      {"reciprocal", reciprocal},
      {"exp", exp},
      {"log", log},
      {"sin", sin},
      {"tanh", tanh},
      {"erf", erf},
      {"sigmoid", sigmoid},
      {"floor", floor},
      {"round", [](const Tensor& x) { return round(x); }},
      {"trunc", trunc},
      {"isnan", isnan},
      {"logical_not", logical_not},
      {"bitwise_not", bitwise_not},
      {"sum", [](const Tensor& x) { return sum(x); }},
      {"prod", [](const Tensor& x) { return prod(x); }},
      {"mean", [](const Tensor& x) { return mean(x); }},
      {"var", [](const Tensor& x) { return var(x); }},
      {"cumsum", [](const Tensor& x) { return cumsum(x, 0); }},
      {"cumprod", [](const Tensor& x) { return cumprod(x, 0); }},
      {"argmax", [](const Tensor& x) { return argmax(x); }},
      {"amax", [](const Tensor& x) { return amax(x); }},
      {"any", [](const Tensor& x) { return any(x); }},
      {"all", [](const Tensor& x) { return all(x); }},
      {"logsumexp", [](const Tensor& x) { return logsumexp(x, {0}); }},
  };
  for (auto& [op, row] : table()["unary"].items()) {
    ASSERT_TRUE(ops.contains(op)) << op;
    for (DType t : kComputedDTypes)
      EXPECT_EQ(outcome([&] { return ops.at(op)(operand(t, 1)); }), std::string(row[name_of(t)]))
          << op << " of " << name_of(t);
  }
}

TEST(Promotion, BinaryOperations) {
  using F = Tensor (*)(Tensor, Tensor);
  const std::map<std::string, F> ops = {
      {"add", add},
      {"sub", sub},
      {"mul", mul},
      {"true_divide", div},
      {"floor_divide", floor_divide},
      {"remainder", remainder},
      {"fmod", fmod},
      {"pow", pow},
      {"maximum", maximum},
      {"atan2", atan2},
      {"eq", eq},
      {"lt", lt},
      {"logical_and", logical_and},
      {"bitwise_and", bitwise_and},
      {"bitwise_left_shift", bitwise_left_shift},
  };
  for (auto& [op, rows] : table()["binary"].items()) {
    ASSERT_TRUE(ops.contains(op)) << op;
    for (DType a : kComputedDTypes)
      for (DType b : kComputedDTypes)
        EXPECT_EQ(outcome([&] { return ops.at(op)(operand(a, 1), operand(b, 1)); }),
                  std::string(rows[name_of(a)][name_of(b)]))
            << op << " of " << name_of(a) << " and " << name_of(b);
  }
}

TEST(Promotion, ThreeOperandsMeetAsTwoAndOne) {
  EXPECT_EQ(clamp(operand(kI32, 1), 0, 1.5).dtype(), kF32);
  EXPECT_EQ(where(operand(kBool, 1), operand(kI32, 1), operand(kF16, 0)).dtype(), kF16);
  EXPECT_EQ(lerp(operand(kF32, 1), operand(kF32, 1), operand(kF64, 0)).dtype(), kF32);
  EXPECT_EQ(mul_add(operand(kI32, 1), operand(kI64, 1), operand(kBF16, 1)).dtype(), kBF16);
}

TEST(Promotion, ComparisonsAreElementwise) {
  const Tensor a = from_values<int64_t>({1, 2, 3}, {3}), b = from_values<float>({2, 2, 2}, {3});
  auto holds = [](const Tensor& t, bool x, bool y, bool z) {
    return t.dtype() == kBool && t.values<bool>()[0] == x && t.values<bool>()[1] == y &&
           t.values<bool>()[2] == z;
  };
  EXPECT_TRUE(holds(a < b, true, false, false) && holds(a < 2, true, false, false) &&
              holds(2 > a, true, false, false));
  EXPECT_TRUE(holds(a <= b, true, true, false) && holds(a <= 2, true, true, false) &&
              holds(2 >= a, true, true, false));
  EXPECT_TRUE(holds(a > b, false, false, true) && holds(a > 2.0, false, false, true) &&
              holds(2 < a, false, false, true));
  EXPECT_TRUE(holds(a >= b, false, true, true) && holds(a >= 2, false, true, true) &&
              holds(2.0 <= a, false, true, true));
  EXPECT_TRUE(holds(a == b, false, true, false) && holds(a == 2, false, true, false) &&
              holds(2 == a, false, true, false));
  EXPECT_TRUE(holds(a != b, true, false, true) && holds(a != 2, true, false, true) &&
              holds(2 != a, true, false, true));
}

TEST(Promotion, NumbersInWhere) {
  const Tensor c = from_values<bool>({true, false}, {2}), x = from_values<float>({3, 4}, {2});
  auto is = [](const Tensor& t, DType dtype, double first, double second) {
    return t.dtype() == dtype && t[0].item<double>() == first && t[1].item<double>() == second;
  };
  EXPECT_TRUE(is(where(c, x, 0), kF32, 3, 0));
  EXPECT_TRUE(is(where(c, 1.5, x.to(kBF16)), kBF16, 1.5, 4));
  EXPECT_TRUE(is(where(c, x.to(kI32), 0.5), kF32, 3, 0.5));
  EXPECT_TRUE(is(where(c, 1.0, 0.0), kF32, 1, 0));
  EXPECT_TRUE(is(where(c, 1, 0), kI64, 1, 0));
  EXPECT_TRUE(is(where(c, 1, 0.5), kF32, 1, 0.5));
  EXPECT_TRUE(is(where(c, false, true), kBool, 0, 1));
}

}  // namespace
}  // namespace tessera
