// The 8-bit floats in compiled functions: a quantising conversion and the way back are one
// generated kernel each, which has the bits of the ops run one by one, on the CPU and on a card.
#include <gtest/gtest.h>

#include <limits>

#include "compile/compile.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "tests/compile/bits.h"
#include "tests/support/on_card.h"

namespace tessera::test {
namespace {

// A matrix with NaN, infinities and what is too large for either format.
Tensor numbers(DType t, int64_t key, Device device) {
  Tensor x = randn({37, 130}, {.device = kCPU}, from_values<int64_t>({key, 1}, {2})) * 300.0;
  x[1][2] = NAN, x[2][3] = INFINITY, x[3][4] = -INFINITY, x[5] = x[5] * 1e6, x[6] = x[6] * 1e-6;
  return x.to(t).to(device);
}

Tensor quantised(const Tensor& x, const Tensor& scale, DType to) {
  return clamp(x.to(kF32) * scale, -448.0, 448.0).to(to);
}

void compare(Device device) {
  const Tensor scale = full({}, 0.75, {kF32, device});
  for (DType to : {kF8E4M3, kF8E5M2}) {
    const DType from = to == kF8E4M3 ? kF32 : kBF16;
    SCOPED_TRACE(std::string(name_of(from)) + " " + std::string(name_of(to)));
    const auto plain = [&](const Tensor& x) { return quantised(x, scale, to); };
    const auto unclamped = [&](const Tensor& x) { return (x * 2.0).to(to).to(kBF16); };
    const auto back = [&](const Tensor& y) { return y.to(from) * scale.to(from); };
    auto f = compile(plain);
    auto g = compile(unclamped);
    auto h = compile(back);
    for (int k = 0; k < 4; ++k) {
      const Tensor x = numbers(from, k, device), y = plain(x);
      expect_same_bits(f(x), y, "quantised");
      expect_same_bits(g(x), unclamped(x), "rounded");
      expect_same_bits(h(y), back(y), "back");
    }
    for (const auto& report : {f.graph_report(), g.graph_report(), h.graph_report()})
      EXPECT_NE(report.find("kernels        1,"), std::string::npos) << report;
  }
}

TEST(Float8, CompiledConversionsOnTheCPU) { compare(kCPU); }

// Every code of both formats, NaNs with each mantissa among them, and every number of 16 bits. What
// the ops run one by one give is compared with the formats' formulas in
// core/tensor/float8_test.cpp.
void compare_all_codes(Device device) {
  const auto all = [&](DType t, auto code) {
    Tensor x = empty({int64_t(std::numeric_limits<decltype(code)>::max()) + 1}, t);
    for (int64_t i = 0; i < x.numel(); ++i)
      static_cast<decltype(code)*>(x.raw())[i] = decltype(code)(i);
    return x.to(device);
  };
  const auto same = [&](const Tensor& x, DType to) {
    SCOPED_TRACE(std::string(name_of(x.dtype())) + " " + std::string(name_of(to)));
    // The first has nothing else in its kernel, the second computes with what it has read.
    const auto alone = [&](const Tensor& t) { return t.to(to); };
    const auto among = [&](const Tensor& t) {
      return (is_storage_only(t.dtype()) ? abs(t.to(to)) : abs(t).to(to)).to(kF32);
    };
    auto f = compile(alone);
    auto g = compile(among);
    for (int k = 0; k < 3; ++k) {
      expect_same_bits(f(x), alone(x), "alone");
      expect_same_bits(g(x), among(x), "among others");
    }
    EXPECT_NE(g.graph_report().find("kernels        1,"), std::string::npos) << g.graph_report();
  };
  for (DType t : {kF8E4M3, kF8E5M2}) {
    for (DType to : {kF32, kF64, kBF16, kF16}) same(all(t, uint8_t()), to);
    for (DType from : {kBF16, kF16}) {
      same(all(from, uint16_t()), t);
      same(all(from, uint16_t()).to(kF32), t);
    }
  }
}

TEST(Float8, EveryCodeInCompiledFunctionsOnTheCPU) { compare_all_codes(kCPU); }

using Float8OnCard = OnCard;
TEST_F(Float8OnCard, CompiledConversions) { compare(card_); }
TEST_F(Float8OnCard, EveryCodeInCompiledFunctions) { compare_all_codes(card_); }

TEST(Float8, CompiledOpsRefuseItByName) {
  auto f = compile([](const Tensor& x) { return x.to(kF8E4M3) + 1.0; });
  try {
    f(ones({3}));
    ADD_FAILURE() << "no error";
  } catch (const UserError& e) {
    EXPECT_NE(std::string(e.what()).find("add: an operand is f8e4m3"), std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace tessera::test
