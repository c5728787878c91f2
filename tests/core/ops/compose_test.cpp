// Compositions of ops against what one kernel would give: 16-bit operands are rounded once, at the
// end; operands of two dtypes are computed in the one in which they meet; and derivatives at the
// points where a quotient inside leaves the floats.
#include "core/ops/compose.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/autograd/autograd.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

using Arg = const Tensor&;

template <class T>
Tensor one(T value) {
  return from_values<T>({value}, {1});
}
double value(const Tensor& t) { return t.to(kF64).item<double>(); }

// Three operands are drawn, each from its range.
struct Case {
  const char* name;
  double low[3], high[3];
  Tensor (*f)(Arg, Arg, Arg);
};
const Case kCases[] = {
    {"addcmul",
     {-4, -300, -300},
     {4, 300, 300},
     [](Arg a, Arg b, Arg c) { return addcmul(a, b, c, 1e-3); }},
    {"addcdiv",
     {-4, -4000, 0.01},
     {4, 4000, 0.02},
     [](Arg a, Arg b, Arg c) { return addcdiv(a, b, c, 1e-3); }},
    {"div_trunc", {-200, 1, 0}, {200, 4, 1}, [](Arg a, Arg b, Arg) { return div_trunc(a, b); }},
    {"round to tenths", {-40, 0, 0}, {40, 1, 1}, [](Arg a, Arg, Arg) { return round(a, 1); }},
    {"round far behind the point",
     {-40, 0, 0},
     {40, 1, 1},
     [](Arg a, Arg, Arg) { return round(a, 4); }},
    {"round to tens", {-400, 0, 0}, {400, 1, 1}, [](Arg a, Arg, Arg) { return round(a, -1); }},
    {"hypot", {-300, -300, 0}, {300, 300, 1}, [](Arg a, Arg b, Arg) { return hypot(a, b); }},
    {"xlogy", {-4, 0.1, 0}, {4, 9, 1}, [](Arg a, Arg b, Arg) { return xlogy(a, b); }},
    {"logaddexp", {-5, -5, 0}, {5, 5, 1}, [](Arg a, Arg b, Arg) { return logaddexp(a, b); }},
    {"logaddexp2", {-5, -5, 0}, {5, 5, 1}, [](Arg a, Arg b, Arg) { return logaddexp2(a, b); }},
    {"logit", {0.1, 0, 0}, {0.9, 1, 1}, [](Arg a, Arg, Arg) { return logit(a); }},
    {"sinc", {-300, 0, 0}, {300, 1, 1}, [](Arg a, Arg, Arg) { return sinc(a); }},
    {"tanhshrink", {-1, 0, 0}, {1, 1, 1}, [](Arg a, Arg, Arg) { return tanhshrink(a); }},
    {"softplus", {-3, 0, 0}, {3, 1, 1}, [](Arg a, Arg, Arg) { return softplus(a, 3.0); }},
    {"celu", {-3, 0, 0}, {60000, 1, 1}, [](Arg a, Arg, Arg) { return celu(a, 0.5); }},
    {"selu", {-3, 0, 0}, {3, 1, 1}, [](Arg a, Arg, Arg) { return selu(a); }},
    {"dot", {-300, -300, 0}, {300, 300, 1}, [](Arg a, Arg b, Arg) { return dot(a, b); }}};

TEST(Compose, SixteenBitsAreRoundedOnce) {
  for (DType t : {kF16, kBF16})
    for (const Case& c : kCases) {
      Tensor in[3];
      for (int i = 0; i < 3; ++i)
        in[i] = cast(sample_values({64}, c.low[i], c.high[i], uint64_t(i + 1)), t);
      const Tensor got = c.f(in[0], in[1], in[2]),
                   want = c.f(in[0].to(kF32), in[1].to(kF32), in[2].to(kF32));
      EXPECT_EQ(got.dtype(), t) << c.name;
      EXPECT_TRUE(equal(got, want.to(t))) << c.name << " " << name_of(t);
    }
}

TEST(Compose, NoStepOverflowsSixteenBits) {
  auto f16 = [](float v) { return one(v).to(kF16); };
  EXPECT_EQ(value(addcmul(f16(1), f16(300), f16(300), 1e-3)), 91);
  EXPECT_EQ(value(round(f16(20.5F), 4)), 20.5);
  EXPECT_EQ(value(celu(f16(40000), 0.5)), 40000);
  const Tensor a = from_values<float>({300, 300}, {2}).to(kF16),
               b = from_values<float>({300, -300}, {2}).to(kF16);
  EXPECT_EQ(value(dot(a, b)), 0);
  EXPECT_NE(value(dot(f16(1e-4F), f16(1e-3F))), 0) << "the product alone is below f16's normals";
}

TEST(Compose, MixedOperandsAreComputedWhereTheyMeet) {
  EXPECT_DOUBLE_EQ(value(xlogy(one(1.0), one(3.F).to(kBF16))), std::log(3.0));
  EXPECT_EQ(xlogy(one(3.F).to(kBF16), one(true)).dtype(), kBF16);
  EXPECT_EQ(value(copysign(one(int64_t(16777217)), one(-1.0))), -16777217);
  EXPECT_EQ(copysign(one(1.F).to(kF16), one(1.F).to(kBF16)).dtype(), kF32);
  EXPECT_EQ(value(logaddexp2(one(0.0), one(int32_t(2147483646)))), 2147483646.0);
  EXPECT_EQ(logaddexp2(one(1.F).to(kBF16), one(uint8_t(1))).dtype(), kBF16);
  EXPECT_EQ(value(hypot(one(INT32_MIN), one(1.F).to(kBF16))), 0x1p31);
  EXPECT_EQ(value(hypot(one(true), one(false))), 1);
  EXPECT_DOUBLE_EQ(value(logaddexp(one(true), one(0.0))), std::log(std::exp(1.0) + 1));
}

TEST(Compose, IntegerBoundsAreSaturatedToTheRangeOfX) {
  const Tensor x = from_values<uint8_t>({200, 255, 0}, {3}),
               y = from_values<int32_t>({5, -5, INT32_MAX}, {3});
  EXPECT_TRUE(equal(clamp(x, -1, 1000), x));
  EXPECT_TRUE(equal(clamp_min(x, -1), x));
  EXPECT_TRUE(equal(clamp_max(x, 1000), x));
  EXPECT_TRUE(equal(clamp(y, int64_t(-1) << 40, int64_t(1) << 40), y));
  EXPECT_TRUE(equal(clamp(y, 0, int64_t(1) << 40), from_values<int32_t>({5, 0, INT32_MAX}, {3})));
  EXPECT_EQ(value(relu6(one(uint8_t(7)))), 6);
}

TEST(Compose, TruthOfBytesIsZeroOrOne) {
  for (const Shape& s : {Shape{}, Shape{1}, Shape{1, 1}, Shape{2, 3}}) {
    const Tensor x = full(s, 3, {.dtype = kU8});
    for (const Tensor& y : {any(x), all(x)}) {
      EXPECT_EQ(y.dtype(), kU8);
      EXPECT_EQ(value(y), 1) << to_string(s);
    }
    EXPECT_EQ(value(any(zeros(s, {.dtype = kU8}))), 0);
  }
}

TEST(Compose, DerivativesWhereQuotientsLeaveTheFloats) {
  Tensor y = zeros({1}).requires_grad_(), x = zeros({1}).requires_grad_();
  sum(atan2(y, x)).backward();
  EXPECT_EQ(value(y.grad()), 0);
  EXPECT_EQ(value(x.grad()), 0);
  for (DType t : {kF32, kF64})
    for (double near : {0.0, 1e-40, -1e-310}) {
      Tensor p = full({1}, near, {.dtype = t}).requires_grad_();
      Tensor s = sinc(p);
      EXPECT_EQ(value(s.detach()), 1);
      sum(s).backward();
      EXPECT_EQ(value(p.grad()), 0) << near;
    }
  Tensor base = one(-0.0), exponent = one(-0.5).requires_grad_();
  sum(pow(base, exponent)).backward();
  EXPECT_EQ(value(exponent.grad()), -INFINITY);
}

std::vector<double> list(const Tensor& t) {
  Tensor wide = contiguous(t.to(kF64));
  return {wide.data<double>(), wide.data<double>() + wide.numel()};
}

TEST(Compose, AnglesAndDistances) {
  Tensor degrees = from_values<double>({0, 90, -180}, {3});
  EXPECT_EQ(list(rad2deg(deg2rad(degrees))), list(degrees));
  EXPECT_NEAR(list(deg2rad(degrees))[1], M_PI / 2, 1e-15);
  Tensor a = from_values<double>({1, 2, 4, 6}, {2, 2}),
         b = from_values<double>({4, 6, 4, 6}, {2, 2});
  EXPECT_NEAR(list(pairwise_distance(a, b, 2, 0))[0], 5, 1e-12);
  EXPECT_NEAR(list(pairwise_distance(a, b, 1, 0))[0], 7, 1e-12);
  EXPECT_NEAR(list(pairwise_distance(a, b))[1], std::sqrt(2) * 1e-6, 1e-12);  // of eps alone
  EXPECT_EQ(pairwise_distance(a, b, 2, 1e-6, true).shape(), (Shape{2, 1}));
}

TEST(Compose, BroadcastsAreViews) {
  Tensor row = from_values<float>({1, 2, 3}, {3}), column = from_values<float>({10, 20}, {2, 1});
  Tensor wide = broadcast_to(row, {2, 3});
  EXPECT_EQ(list(wide), (std::vector<double>{1, 2, 3, 1, 2, 3}));
  EXPECT_EQ(wide.storage(), row.storage());
  Tensor both[] = {row, column};
  Tensors same = broadcast_tensors(both);
  EXPECT_EQ(list(same[0] + same[1]), (std::vector<double>{11, 12, 13, 21, 22, 23}));
  EXPECT_EQ(same[1].storage(), column.storage());
  EXPECT_THROW(broadcast_to(row, {2, 2}), ShapeError);
}

TEST(Compose, WhatIsLikeAnotherHasItsShapeAndDtype) {
  Tensor x = empty_like(zeros({2, 3}, {.dtype = kBF16}));
  EXPECT_EQ(x.shape(), (Shape{2, 3}));
  EXPECT_EQ(x.dtype(), kBF16);
}

TEST(Compose, PermutationsHoldEachNumberOnce) {
  for (int64_t n : {0, 1, 2, 1000}) {
    std::vector<double> drawn = list(randperm(n));
    std::vector<double> sorted = drawn;
    std::sort(sorted.begin(), sorted.end());
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(sorted[size_t(i)], double(i));
    if (n == 1000) {
      EXPECT_NE(drawn, sorted);
      EXPECT_NE(drawn, list(randperm(n)));
    }
  }
  EXPECT_THROW(randperm(-1), UserError);
}

}  // namespace
}  // namespace tessera
