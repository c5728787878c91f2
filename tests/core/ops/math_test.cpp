// Compares the scalar functions of core/ops/functors with the platform's double libm, over a stride
// of all float bit patterns (denormals, infinities and NaN included) and over special values. The
// loops under test are the ones GCC vectorises, so vector code is what gets checked.
// TESSERA_MATH_STRIDE=1 makes the unary sweep exhaustive (scripts/check_math_all.sh).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

// These include nothing, so their order matters.
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/group.h"
#include "core/ops/functors/math.h"
#include "core/ops/functors/math_trig.h"
#include "core/ops/functors/pieces.h"
#include "core/ops/functors/activations.h"
#include "core/ops/functors/special.h"
// clang-format on

namespace {

namespace fn = tessera::fn;
using Batch = void (*)(const float*, float*, int);
using Batch2 = void (*)(const float*, const float*, float*, int);

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// A bound is `ulp` units in the last place of the exact result, or `absolute` where that is larger.
struct Unary {
  const char* name;
  Batch run;
  double (*reference)(double);
  double ulp;
  double absolute = 0.0;
};

// Those that are for groups, in groups, and the rest one by one; for arguments up to 88.
double exp_by_table(double x) { return fn::exp_by_table(std::isnan(x) ? x : std::min(x, 88.0)); }
template <class F>
void in_groups(F f, const float* x, float* y, int n) {
  constexpr int kGroup = 32;
  int i = 0;
  for (; i + kGroup <= n; i += kGroup) fn::store(y + i, f(fn::load<kGroup>(x + i)));
  for (; i < n; ++i) y[i] = f(x[i]);
}
void exp_by_table(const float* x, float* y, int n) {
  std::vector<float> low(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) low[static_cast<size_t>(i)] = x[i] > 88.0f ? 88.0f : x[i];
  in_groups([](auto v) { return fn::exp_by_table(v); }, low.data(), y, n);
}

#define UNARY(name, ...)                                                                       \
  Unary {                                                                                      \
#name,                                                                                       \
        [](const float* x, float* y, int n) {                                                    \
          for (int i = 0; i < n; ++i) y[i] = fn::name(x[i]);                                     \
        },                                                                                       \
        [](double x) -> double { return fn::name(x); }, __VA_ARGS__ \
  }

#define IN_GROUPS(name, ...)                                          \
  Unary {                                                             \
#name,                                                              \
        [](const float* x, float* y, int n) {                           \
          in_groups([](auto v) { return fn::name(v); }, x, y, n);       \
        },                                                              \
        [](double x) -> double { return fn::name(x); }, __VA_ARGS__ \
  }

// The double forms call libm, or follow the formula from there; DoubleForms below checks them on
// their own.
const Unary kUnary[] = {
    UNARY(exp, 2),
    UNARY(exp2, 2),
    UNARY(expm1, 2),
    UNARY(log, 2),
    UNARY(log2, 2),
    UNARY(log10, 2),
    UNARY(log1p, 2),
    UNARY(sinh, 2),
    UNARY(cosh, 2),
    UNARY(tanh, 2),
    UNARY(asinh, 2),
    UNARY(acosh, 2),
    UNARY(atanh, 2),
    UNARY(rsqrt, 2),
    UNARY(cbrt, 2),
    UNARY(sin, 2),
    UNARY(cos, 2),
    UNARY(tan, 2),
    UNARY(asin, 2),
    UNARY(acos, 2),
    UNARY(atan, 2),
    UNARY(erf, 2),
    UNARY(erfc, 2),
    UNARY(erfinv, 1),
    UNARY(lgamma, 1),
    UNARY(digamma, 1),
    UNARY(trigamma, 1),
    IN_GROUPS(sigmoid, 2),
    UNARY(softplus, 2),
    UNARY(logsigmoid, 2),
    IN_GROUPS(silu, 4),
    UNARY(mish, 4),
    IN_GROUPS(gelu, 4),
    IN_GROUPS(gelu_tanh, 4, 0x1p-24),
    IN_GROUPS(gelu_grad, 4, 0x1p-22),
    IN_GROUPS(gelu_tanh_grad, 4, 0x1p-22),
    Unary{"exp_by_table", exp_by_table, exp_by_table, 1, 0x1.06p-127},
};
#undef UNARY
#undef IN_GROUPS

double clamp_to_float(double v) {
  return std::isnan(v) ? v : std::clamp(v, -0x1p128, 0x1p128);  // an overflow counts as 2^128
}

double unit_in_last_place(double v) {
  int e = 0;
  std::frexp(v, &e);
  return std::ldexp(1.0, std::max(e, -125) - 24);
}

struct Worst {
  double ulp = 0.0, absolute = 0.0;
  float at = 0.0f;
  void see(double error, double units, float x) {
    absolute = std::max(absolute, error);
    if (units > ulp) {
      ulp = units;
      at = x;
    }
  }
};

// False if `got` is not an acceptable float for the exact value `want`.
bool acceptable(float got, double want, double ulp, double absolute, float x, Worst& worst) {
  if (std::isnan(want) || std::isnan(got)) return std::isnan(want) && std::isnan(got);
  if (std::isinf(want) && std::isinf(x)) return static_cast<double>(got) == want;
  if (got == 0.0f && std::signbit(got) != std::signbit(want)) return false;
  const double exact = clamp_to_float(want), error = std::abs(clamp_to_float(got) - exact);
  const double units = error / unit_in_last_place(exact);
  const bool good = units <= ulp || error <= absolute;
  if (units > ulp && good) {
    worst.absolute = std::max(worst.absolute, error);
  } else {
    worst.see(0.0, units, x);
  }
  return good;
}

float from_pattern(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

uint64_t stride() {
  const char* text = std::getenv("TESSERA_MATH_STRIDE");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 2039;
}

std::vector<float> special_values() {
  std::vector<float> v;
  for (float a : {0.0f,
                  0x1p-149f,
                  0x1p-148f,
                  3.0e-41f,
                  0x1.fffffcp-127f,
                  0x1p-126f,
                  1e-30f,
                  1e-10f,
                  0x1p-24f,
                  1e-3f,
                  0.25f,
                  0.34657f,
                  0.5f,
                  0.6931f,
                  0x1.fffffep-1f,
                  1.0f,
                  0x1.000002p0f,
                  1.5f,
                  1.5707964f,
                  2.0f,
                  3.0f,
                  3.1415927f,
                  4.0f,
                  5.25f,
                  7.5f,
                  9.0f,
                  15.49f,
                  15.5f,
                  17.3f,
                  20.0f,
                  87.3f,
                  88.72284f,
                  88.7229f,
                  89.41599f,
                  89.42f,
                  103.9f,
                  104.1f,
                  126.0f,
                  127.0f,
                  128.0f,
                  149.0f,
                  150.0f,
                  65535.9f,
                  65536.0f,
                  65536.01f,
                  8191.9f,
                  8193.0f,
                  1e6f,
                  8388607.5f,
                  8388608.0f,
                  16777215.0f,
                  16777216.0f,
                  0x1.f3806ep95f,
                  1e18f,
                  1e19f,
                  1e30f,
                  1.7e38f,
                  0x1.fffffep127f,
                  kInfinity,
                  kNaN}) {
    v.push_back(a);
    v.push_back(-a);
  }
  return v;
}

// Both signs of the floats around the borders of the pieces of tables (pieces.h), which lie at odd
// quarters and at odd halves, and of points where a search at fewer floats had left gelu more than
// 4 ulp off.
std::vector<float> around_borders() {
  std::vector<float> v;
  for (float x : {3.25117f, 4.35185862f, 4.3599472f}) v.insert(v.end(), {x, -x});
  for (int quarters = 1; quarters <= 62; ++quarters) {
    const uint32_t border = fn::bits(0.25f * static_cast<float>(quarters));
    for (uint32_t b = border - 64; b <= border + 64; ++b)
      v.insert(v.end(), {from_pattern(b), -from_pattern(b)});
  }
  return v;
}

class UnaryTest : public testing::TestWithParam<Unary> {};

TEST_P(UnaryTest, StaysWithinItsBound) {
  const Unary& f = GetParam();
  constexpr int kBlock = 4096;
  std::vector<float> x(kBlock), y(kBlock);
  Worst worst;
  int failures = 0;
  const auto check = [&](int n) {
    f.run(x.data(), y.data(), n);
    for (int i = 0; i < n; ++i) {
      const double want = f.reference(x[i]);
      if (!acceptable(y[i], want, f.ulp, f.absolute, x[i], worst) && ++failures <= 5) {
        ADD_FAILURE() << f.name << "(" << x[i] << "): got " << y[i] << ", exact " << want << ", "
                      << std::abs(y[i] - want) / unit_in_last_place(want) << " ulp";
      }
    }
  };
  const std::vector<float> special = special_values();
  std::copy(special.begin(), special.end(), x.begin());
  check(static_cast<int>(special.size()));
  int filled = 0;
  const auto add = [&](float v) {
    x[filled++] = v;
    if (filled == kBlock) {
      check(filled);
      filled = 0;
    }
  };
  for (float v : around_borders()) add(v);
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += stride())
    add(from_pattern(static_cast<uint32_t>(bits)));
  check(filled);
  EXPECT_EQ(failures, 0);
  std::printf(
      "%-15s max %.3f ulp at %a%s\n", f.name, worst.ulp, worst.at,
      worst.absolute > 0.0
          ? (", elsewhere absolute " + std::to_string(worst.absolute * 0x1p24) + " * 2^-24").c_str()
          : "");
}

INSTANTIATE_TEST_SUITE_P(Functions, UnaryTest, testing::ValuesIn(kUnary),
                         [](const auto& info) { return std::string(info.param.name); });

uint32_t next_random(uint32_t& state) {  // xorshift32, Marsaglia 2003
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return state;
}

void check_binary(const char* name, Batch2 run, double (*reference)(double, double), double ulp) {
  std::vector<float> a, b;
  for (float u : special_values()) {
    for (float v : special_values()) {
      a.push_back(u);
      b.push_back(v);
    }
  }
  uint32_t state = 1;
  for (int i = 0; i < 1'000'000; ++i) {  // any two bit patterns, then two of moderate size
    a.push_back(from_pattern(next_random(state)));
    b.push_back(from_pattern(next_random(state)));
    a.push_back(static_cast<float>(next_random(state)) * 0x1p-28f);
    b.push_back(static_cast<float>(static_cast<int32_t>(next_random(state))) * 0x1p-26f);
  }
  std::vector<float> y(a.size());
  run(a.data(), b.data(), y.data(), static_cast<int>(a.size()));
  Worst worst;
  int failures = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double want = reference(a[i], b[i]);
    const float place = std::isinf(want) ? kInfinity : a[i];
    if (!acceptable(y[i], want, ulp, 0.0, place, worst) && ++failures <= 5) {
      ADD_FAILURE() << name << "(" << a[i] << ", " << b[i] << "): got " << y[i] << ", exact "
                    << want;
    }
  }
  EXPECT_EQ(failures, 0);
  std::printf("%-15s max %.3f ulp\n", name, worst.ulp);
}

TEST(Binary, Pow) {
  check_binary(
      "pow",
      [](const float* x, const float* y, float* out, int n) {
        for (int i = 0; i < n; ++i) out[i] = fn::pow(x[i], y[i]);
      },
      [](double x, double y) { return std::pow(x, y); }, 2);
}

TEST(Binary, Atan2) {
  check_binary(
      "atan2",
      [](const float* y, const float* x, float* out, int n) {
        for (int i = 0; i < n; ++i) out[i] = fn::atan2(y[i], x[i]);
      },
      [](double y, double x) { return std::atan2(y, x); }, 2);
}

TEST(Prelude, FmaKeepsTheExactProduct) {
  uint32_t state = 7;
  for (int i = 0; i < 1'000'000; ++i) {
    const float a = from_pattern(next_random(state)), b = from_pattern(next_random(state));
    float c = from_pattern(next_random(state));
    if (i % 2 != 0) c = -a * b * (1.0f + static_cast<float>(i % 5) * 0x1p-23f);  // cancellation
    const float want = std::fmaf(a, b, c), got = fn::fma(a, b, c);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got));
    } else {
      ASSERT_EQ(fn::bits(want), fn::bits(got)) << a << " * " << b << " + " << c;
    }
  }
}

TEST(Prelude, RintRoundsHalvesToEven) {
  for (float x : special_values()) {
    if (std::isnan(x)) continue;
    EXPECT_EQ(fn::bits(fn::rint(x)), fn::bits(std::nearbyint(x))) << x;
    EXPECT_EQ(fn::rint(x + 0.5), std::nearbyint(x + 0.5)) << x;
  }
}

template <class F>
void expect_groups_of_floats(F f) {
  constexpr int kGroup = 32;
  std::vector<float> x, y(kGroup);
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 4099)
    x.push_back(from_pattern(static_cast<uint32_t>(bits)));
  for (float v : special_values()) x.push_back(v);
  x.resize(x.size() / kGroup * kGroup);
  for (size_t i = 0; i < x.size(); i += kGroup) {
    fn::store(y.data(), f(fn::load<kGroup>(&x[i])));
    for (size_t l = 0; l < kGroup; ++l) {
      const float want = f(x[i + l]);
      ASSERT_EQ(fn::bits(std::isnan(want) ? kNaN : want), fn::bits(std::isnan(y[l]) ? kNaN : y[l]))
          << x[i + l];
    }
  }
}

TEST(Groups, AreTheirFloats) {
  expect_groups_of_floats([](auto v) { return fn::exp_by_table(v); });
  expect_groups_of_floats([](auto v) { return fn::sigmoid(v); });
  expect_groups_of_floats([](auto v) { return fn::silu(v); });
  expect_groups_of_floats([](auto v) { return fn::gelu(v); });
  expect_groups_of_floats([](auto v) { return fn::gelu_grad(v); });
  expect_groups_of_floats([](auto v) { return fn::gelu_tanh(v); });
  expect_groups_of_floats([](auto v) { return fn::gelu_tanh_grad(v); });
  EXPECT_EQ(fn::exp_by_table(0.0f), 1.0f);
  EXPECT_EQ(fn::bits(fn::exp_by_table(-88.1f)), 0);
}

// The composed double forms against the same formula in long double.
TEST(DoubleForms, AgreeWithLongDouble) {
  const auto near = [](double got, long double want) {
    EXPECT_LE(std::abs(static_cast<long double>(got) - want), 1e-12L * std::abs(want) + 1e-300L)
        << got;
  };
  for (long double x = -30.0L; x <= 30.0L; x += 0.37L) {
    const double d = static_cast<double>(x);
    const long double v = d, s = 1.0L / (1.0L + std::exp(-v));
    const long double phi = std::exp(-0.5L * v * v) * 0.398942280401432677939946L;
    const long double normal = 0.5L * std::erfc(-v * 0.707106781186547524400844L);
    near(fn::sigmoid(d), s);
    near(fn::softplus(d), std::log1p(std::exp(v)));
    near(fn::logsigmoid(d), -std::log1p(std::exp(-v)));
    near(fn::silu(d), v * s);
    near(fn::mish(d), v * std::tanh(std::log1p(std::exp(v))));
    near(fn::gelu(d), v * normal);
    EXPECT_NEAR(fn::gelu_grad(d), static_cast<double>(normal + v * phi), 1e-14);
    const long double c = 1.595769121605730711759784L;
    const long double t = 1.0L / (1.0L + std::exp(-c * (v + 0.044715L * v * v * v)));
    EXPECT_NEAR(fn::gelu_tanh(d), static_cast<double>(v * t), 1e-14 * (1.0 + std::abs(d)));
    const long double slope = t + v * t * (1.0L - t) * c * (1.0L + 0.134145L * v * v);
    EXPECT_NEAR(fn::gelu_tanh_grad(d), static_cast<double>(slope), 1e-13);
  }
}

// psi and its derivative by a longer recurrence and series.
long double long_digamma(long double x) {
  const long double pi = 3.141592653589793238462643L;
  if (x < 0) return long_digamma(1 - x) - pi / std::tan(pi * (x - std::rint(x)));
  long double sum = 0;
  for (; x < 40; ++x) sum += 1 / x;
  const long double z = 1 / (x * x);
  return std::log(x) - 0.5L / x - sum -
         z * (1 / 12.0L - z * (1 / 120.0L - z * (1 / 252.0L - z * (1 / 240.0L - z / 132.0L))));
}
long double long_trigamma(long double x) {
  const long double pi = 3.141592653589793238462643L;
  if (x < 0) {
    const long double q = pi / std::sin(pi * (x - std::rint(x)));
    return q * q - long_trigamma(1 - x);
  }
  long double sum = 0;
  for (; x < 40; ++x) sum += 1 / (x * x);
  const long double z = 1 / (x * x);
  return sum + 1 / x + z / 2 +
         z / x * (1 / 6.0L - z * (1 / 30.0L - z * (1 / 42.0L - z * (1 / 30.0L - z * 5 / 66.0L))));
}

TEST(DoubleForms, GammaFamilyAgreesWithLongDouble) {
  for (double x = -20.03; x < 40; x += 0.0137) {
    const long double psi = long_digamma(x), psi1 = long_trigamma(x);
    EXPECT_LE(std::abs(fn::digamma(x) - psi), 0x1p-50L * std::abs(psi) + 0x1p-48L) << x;
    EXPECT_LE(std::abs(fn::trigamma(x) - psi1), 0x1p-49L * std::abs(psi1)) << x;
  }
  for (double x : {1e-300, 1e-20, 1e-5, 1e5, 1e20, 1e300}) {
    const long double psi = long_digamma(x), psi1 = long_trigamma(x);
    EXPECT_LE(std::abs(fn::digamma(x) - psi), 0x1p-50L * std::abs(psi)) << x;
    if (std::isfinite(fn::trigamma(x))) {
      EXPECT_LE(std::abs(fn::trigamma(x) - psi1), 0x1p-49L * std::abs(psi1)) << x;
    }
  }
  EXPECT_EQ(fn::digamma(0.0), -kInfinity);
  EXPECT_EQ(fn::digamma(-0.0), kInfinity);
  EXPECT_TRUE(std::isnan(fn::digamma(-3.0)));
  EXPECT_EQ(fn::trigamma(-3.0), kInfinity);
  EXPECT_EQ(fn::lgamma(-3.0), kInfinity);
}

// One step of Newton's in long double, from the side where erf does not round to 1, says how far
// the result is from the root.
TEST(DoubleForms, ErfinvInvertsErf) {
  const auto check = [](double x, long double complement) {
    const long double y = fn::erfinv(x), slope = 1.128379167095512573896L * std::exp(-y * y);
    const long double miss = x > 0.5 ? complement - std::erfc(y) : std::erf(y) - x;
    EXPECT_LE(std::abs(miss / slope), 0x1p-50L * std::abs(y)) << x;
    EXPECT_EQ(fn::erfinv(-x), -fn::erfinv(x));
  };
  for (double x = 0x1p-9; x < 1; x += 0x1p-9) check(x, 1 - static_cast<long double>(x));
  for (int k = 2; k <= 53; ++k) check(1 - std::ldexp(1.0, -k), std::ldexp(1.0L, -k));
  for (int k = 10; k < 1000; k += 10) check(std::ldexp(1.0, -k), 1);
  EXPECT_EQ(fn::erfinv(1.0), kInfinity);
  EXPECT_EQ(fn::erfinv(-1.0), -kInfinity);
  EXPECT_TRUE(std::isnan(fn::erfinv(1.0000001)));
}

}  // namespace
