// The 8-bit floats against their definition: what each code means, how every 16-bit float is
// rounded, what moves them and what refuses them.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/autograd/autograd.h"
#include "core/autograd/transforms.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/tensor/element.h"
#include "core/tensor/tensor.h"

namespace tessera {
namespace {

struct Format {
  DType dtype;
  int mantissa_bits, bias, first_special;  // the first code that stands for no finite number
  bool has_infinity;
};
constexpr Format kFormats[] = {{kF8E4M3, 3, 7, 0x7f, false}, {kF8E5M2, 2, 15, 0x7c, true}};

// (-1)^sign 2^(exponent - bias) (1 + mantissa / 2^bits), or without the 1 where the exponent is 0.
double value_of(const Format& f, int code) {
  const int low = code & 0x7f, mantissa = low & ((1 << f.mantissa_bits) - 1),
            exponent = low >> f.mantissa_bits;
  double v = (exponent ? 1 : 0) + mantissa / double(1 << f.mantissa_bits);
  v *= std::pow(2.0, std::max(exponent, 1) - f.bias);
  if (low >= f.first_special) v = f.has_infinity && low == f.first_special ? INFINITY : NAN;
  return code & 0x80 ? -v : v;
}

// The code of the nearest number, the even one of two; the first special code stands for the number
// that would follow the largest.
int nearest(const Format& f, double x) {
  const int sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return sign | 0x7f;
  const double a = std::abs(x),
               beyond = 2 * value_of(f, f.first_special - 1) - value_of(f, f.first_special - 2);
  if (a >= beyond) return sign | f.first_special;
  int best = 0;
  for (int code = 0; code <= f.first_special; ++code) {
    const double v = code == f.first_special ? beyond : value_of(f, code),
                 b = best == f.first_special ? beyond : value_of(f, best);
    if (std::abs(v - a) < std::abs(b - a) || (std::abs(v - a) == std::abs(b - a) && code % 2 == 0))
      best = code;
  }
  return sign | best;
}

float widened(DType t, int code) {
  return t == kF8E4M3 ? to_float(Float8E4M3{uint8_t(code)}) : to_float(Float8E5M2{uint8_t(code)});
}
int narrowed(DType t, float x) {
  return t == kF8E4M3 ? to_float8_e4m3(x).bits : to_float8_e5m2(x).bits;
}

Tensor of_codes(DType t, int64_t count) {
  Tensor x = empty({count}, t);
  for (int64_t i = 0; i < count; ++i) static_cast<uint8_t*>(x.raw())[i] = uint8_t(i);
  return x;
}
const uint8_t* codes(const Tensor& t) { return static_cast<const uint8_t*>(t.raw_values()); }

TEST(Float8, EveryCodeMeansWhatItsFormulaSays) {
  for (const Format& f : kFormats) {
    const Tensor all = of_codes(f.dtype, 256), every_other = slice(all, 0, 0, 256, 2);
    for (DType to : {kF16, kBF16, kF32, kF64}) {
      const Tensor wide = cast(all, to), strided = cast(every_other, to);
      for (int code = 0; code < 256; ++code) {
        const double want = value_of(f, code);
        auto is = [&](double got) {
          return std::isnan(want) ? std::isnan(got)
                                  : got == want && std::signbit(got) == std::signbit(want);
        };
        const char* at = static_cast<const char*>(wide.raw_values()) + size_t(code) * size_of(to);
        ASSERT_TRUE(is(read_real(at, to))) << name_of(f.dtype) << " " << code << " " << name_of(to);
        ASSERT_TRUE(is(widened(f.dtype, code))) << name_of(f.dtype) << " " << code;
        if (code % 2) continue;
        at = static_cast<const char*>(strided.raw_values()) + size_t(code) / 2 * size_of(to);
        ASSERT_TRUE(is(read_real(at, to))) << name_of(f.dtype) << " " << code;
      }
    }
  }
}

TEST(Float8, EverySixteenBitFloatIsRoundedToTheNearest) {
  for (DType from : {kF16, kBF16}) {
    Tensor all = empty({1 << 16}, from);
    for (int i = 0; i < 1 << 16; ++i) static_cast<uint16_t*>(all.raw())[i] = uint16_t(i);
    const Tensor wide = cast(all, kF32), precise = cast(all, kF64);
    for (const Format& f : kFormats) {
      const Tensor direct = cast(all, f.dtype), from_f32 = cast(wide, f.dtype),
                   from_f64 = cast(precise, f.dtype);
      for (int i = 0; i < 1 << 16; ++i) {
        const float x = wide.values<float>()[i];
        const int want = nearest(f, x);
        ASSERT_EQ(narrowed(f.dtype, x), want) << name_of(f.dtype) << " of " << x;
        ASSERT_EQ(codes(direct)[i], want) << name_of(f.dtype) << " of " << x;
        ASSERT_EQ(codes(from_f32)[i], want) << name_of(f.dtype) << " of " << x;
        ASSERT_EQ(codes(from_f64)[i], want) << name_of(f.dtype) << " of " << x;
      }
    }
  }
}

// f32 beside the middles of neighbours, which bf16 and f16 may not hold.
TEST(Float8, MiddlesGoToTheEvenNeighbour) {
  for (const Format& f : kFormats)
    for (int code = 0; code < f.first_special; ++code) {
      const double low = value_of(f, code), high = code + 1 == f.first_special
                                                       ? 2 * low - value_of(f, code - 1)
                                                       : value_of(f, code + 1);
      const float middle = float((low + high) / 2);
      ASSERT_EQ(double(middle), (low + high) / 2);
      for (int sign : {0, 0x80}) {
        const float s = sign ? -1.f : 1.f;
        EXPECT_EQ(narrowed(f.dtype, s * middle), sign | (code + code % 2));
        EXPECT_EQ(narrowed(f.dtype, s * std::nextafter(middle, 0.f)), sign | code);
        EXPECT_EQ(narrowed(f.dtype, s * std::nextafter(middle, INFINITY)), sign | (code + 1));
      }
    }
}

TEST(Float8, WhatIsBeyondTheLargestIsNaNOrInfinite) {
  auto e4m3 = [](float x) { return widened(kF8E4M3, narrowed(kF8E4M3, x)); };
  auto e5m2 = [](float x) { return widened(kF8E5M2, narrowed(kF8E5M2, x)); };
  EXPECT_EQ(e4m3(464), 448);
  EXPECT_TRUE(std::isnan(e4m3(464.1f)) && std::isnan(e4m3(-1e30f)) && std::isnan(e4m3(INFINITY)));
  EXPECT_EQ(e5m2(61439), 57344);
  EXPECT_EQ(e5m2(61440), INFINITY);
  EXPECT_EQ(e5m2(-1e30f), -INFINITY);
  EXPECT_TRUE(std::isnan(e5m2(NAN)));
}

TEST(Float8, IsCreatedViewedCopiedReadAndPrinted) {
  const Tensor x = tensor({{1, -2.5, 448}, {0.0, 0.3, 1000}}, {.dtype = kF8E4M3});
  EXPECT_EQ(to_string(x),
            "[[  1.0000,  -2.5000, 448.0000],\n [  0.0000,   0.3125,      nan]] f8e4m3[2, 3]");
  EXPECT_EQ(x[0][1].item<float>(), -2.5f);
  const Tensor turned = contiguous(transpose(x, 0, 1));
  EXPECT_EQ(turned[1][0].item<double>(), -2.5);
  EXPECT_EQ(zeros({2}, {.dtype = kF8E5M2}).to(kF32)[1].item<float>(), 0);
  EXPECT_EQ(full({2}, 3, {.dtype = kF8E5M2}).to(kF32)[1].item<float>(), 3);
  Tensor part = zeros({2, 3}, {.dtype = kF8E4M3});
  part[1] = x[0];
  EXPECT_EQ(part.to(kF32)[1][2].item<float>(), 448);
  const Float8E4M3 bits[] = {{0x38}, {0xb8}};
  EXPECT_EQ(from_values<Float8E4M3>(bits, {2}).to(kF32)[1].item<float>(), -1);
}

template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const UserError& e) {
    return e.what();
  }
  return "";
}

TEST(Float8, OpsRefuseIt) {
  const Tensor x = zeros({2}, {.dtype = kF8E4M3}), y = zeros({2}),
               z = zeros({2}, {.dtype = kF8E5M2});
  const std::string remedy = "f8e4m3 is a storage format, convert it by .to(kF32) first";
  EXPECT_EQ(error_of([&] { add(x, x); }), "add: an operand is f8e4m3[2] cpu; " + remedy);
  EXPECT_EQ(error_of([&] { mul(y, x); }), "mul: an operand is f8e4m3[2] cpu; " + remedy);
  EXPECT_EQ(error_of([&] { exp(x); }), "exp: an operand is f8e4m3[2] cpu; " + remedy);
  EXPECT_EQ(error_of([&] { x * 2; }), "mul: an operand is f8e4m3[2] cpu; " + remedy);
  EXPECT_EQ(error_of([&] { mul_(zeros({2}, {.dtype = kF8E4M3}), 2.0); }),
            "mul: an operand is f8e4m3[2] cpu; " + remedy);
  EXPECT_NE(error_of([&] { result_type(x, z); }), "");
  EXPECT_EQ(error_of([&] { promote(kF32, kF8E4M3); }),
            "promote: f32 and f8e4m3 have no common dtype; " + remedy);
  EXPECT_NE(error_of([&] { arange(0, 4, 1, {.dtype = kF8E4M3}); }).find("arange: asked for f8e4m3"),
            std::string::npos);
  EXPECT_NE(error_of([&] { rand({4}, {.dtype = kF8E4M3}); }).find("rand: asked for f8e4m3"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              Tensor sum = zeros({2});
              sum += x;
            }),
            "");
}

TEST(Float8, IsConvertedSampleBySample) {
  const Tensor x = tensor({{1, 2.6}, {-3, 500}});
  const Tensor y = vmap([](const Tensor& row) { return row.to(kF8E4M3); })(x);
  EXPECT_EQ(to_string(y), to_string(x.to(kF8E4M3)));
}

TEST(Float8, HasNoGradients) {
  Tensor x = ones({2}).requires_grad_();
  EXPECT_FALSE(x.to(kF8E4M3).requires_grad());
  EXPECT_NE(error_of([&] { zeros({2}, {.dtype = kF8E4M3}).requires_grad_(); }), "");
}

}  // namespace
}  // namespace tessera
