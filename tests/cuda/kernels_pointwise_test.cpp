// pointwise.cu against the same functors compiled for the host: f32 results have the same bits, as
// do integers and 16-bit floats, which are computed in f32; f64 goes through another libm.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "core/backend/cuda/kernels/pointwise.h"
#include "core/backend/cuda/refusals.h"
#include "tests/cuda/kernels_device.h"
// Each text needs the one before it.
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/math.h"
#include "core/ops/functors/math_trig.h"
#include "core/ops/functors/pieces.h"
#include "core/ops/functors/activations.h"
#include "core/ops/functors/special.h"
#include "core/ops/functors/arithmetic.h"
#include "core/ops/functors/convert.h"
#include "core/ops/functors/pointwise.h"
// clang-format on
#include "core/ops/pointwise_columns.h"

namespace tessera::cuda::test {
namespace {

using namespace columns;

// What the host makes of three operands of one compute type.
template <class T>
using Reference = double (*)(T, T, T);
template <class F, class T, Kind kind, int operands>
constexpr Reference<T> reference() {
  if constexpr (std::is_same_v<T, long> ? kind == kFloat : kind == kBits)
    return nullptr;
  else
    return [](T x, [[maybe_unused]] T y, [[maybe_unused]] T z) -> double {
      auto r = [&] {
        if constexpr (operands == 1) return F::apply(x);
        if constexpr (operands == 2) return F::apply(x, y);
        if constexpr (operands == 3) return F::apply(x, y, z);
      }();
      if constexpr (std::is_same_v<decltype(r), long>)
        return std::bit_cast<double>(r);  // exact beyond 2^53
      else
        return double(r);
    };
}
struct Row {
  Reference<float> f32;
  Reference<double> f64;
  Reference<long> i64;
};
template <class F, Kind kind, int operands>
constexpr Row row() {
  return {reference<F, float, kind, operands>(), reference<F, double, kind, operands>(),
          reference<F, long, kind, operands>()};
}
constexpr Row kRows[] = {
#define TESSERA_OP1(name, kernel, kind, ...) row<functors::name, kind, 1>(),
#define TESSERA_OP2(name, kernel, kind, ...) row<functors::name, kind, 2>(),
#define TESSERA_OP3(name, kernel, kind, ...) row<functors::name, kind, 3>(),
#include "core/ops/pointwise.def"
};

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kSpecial[] = {0.0f,   -0.0f,   1.0f,    -1.0f, kInf,  -kInf, NAN,
                              1e-40f, -1e-42f, 3.4e38f, 0.5f,  -2.5f, 1e30f, 65537.0f};

std::vector<float> numbers(size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> x(n);
  for (size_t i = 0; i < n; ++i)
    x[i] = i % 3 == 0 ? std::bit_cast<float>(uint32_t(random()))
                      : float(int(random() % 20001) - 10000) * 1e-3f;
  for (size_t i = 0; i < n && i < 14 * 14; ++i) x[i] = kSpecial[(seed % 2 ? i / 14 : i) % 14];
  return x;
}

class Pointwise : public KernelTest {
 protected:
  // Runs on dense operands of n elements, the last of them a number by value where `by_value`.
  template <class T, class R>
  std::vector<R> run(const KernelText& text, const std::string& instance, PointwiseShape shape,
                     std::vector<std::vector<T>> in, size_t n, bool aligned, bool by_value = false,
                     unsigned long long* reported = nullptr) {
    const size_t shift = aligned ? 0 : 1;
    std::vector<std::unique_ptr<Array<T>>> arrays;
    Array<R> out(n + shift);
    out.fill(0);
    Array<unsigned long long> report(1);
    report.fill(0);
    const int64_t extent = int64_t(n), one = 1, zero = 0;
    std::vector<Strided> operands{{out.get() + shift, int(sizeof(R)), {&one, 1}}};
    std::vector<unsigned long long> values(3);
    for (std::vector<T>& x : in) {
      x.insert(x.begin(), shift, T{});
      arrays.push_back(std::make_unique<Array<T>>(x));
      operands.push_back({arrays.back()->get() + shift, int(sizeof(T)), {&one, 1}});
    }
    if (by_value) {
      operands.back() = {nullptr, int(sizeof(T)), {&zero, 1}};
      if constexpr (sizeof(T) == 4)
        values[in.size() - 1] = std::bit_cast<uint32_t>(in.back()[shift]);
    }
    const auto launches = pointwise_launches(pointwise_walks(shape, {&extent, 1}, operands),
                                             operands, values, report.get());
    EXPECT_EQ(launches.size(), 1u);
    for (const PointwiseLaunch& l : launches) {
      EXPECT_STREQ(l.entry(), aligned && n % size_t(shape.width) == 0 && shape.width > 1
                                  ? "packs"
                                  : "elements");
      d().launch(d().function(text, instance + "_" + l.entry()), l.geometry, l.call);
    }
    std::vector<R> r = out.read();
    if (reported) *reported = report.read()[0];
    return {r.begin() + long(shift), r.end()};
  }
};

TEST_F(Pointwise, EveryOpHasTheBitsOfTheHostInF32) {
  const size_t n = 2048;
  const auto x = numbers(n, 1), y = numbers(n, 2), z = numbers(n, 4);
  KernelText text{"pointwise", {}};
  for (size_t i = 0; i < pointwise_ops().size(); ++i)
    if (kRows[i].f32) text.instances.push_back(pointwise_instance(pointwise_ops()[i], kF32));
  ASSERT_GT(text.instances.size(), 60u);
  for (size_t i = 0; i < pointwise_ops().size(); ++i) {
    const PointwiseOp& op = pointwise_ops()[i];
    if (!kRows[i].f32) continue;
    const std::string name = std::string(op.name) + "_f32";
    for (const bool aligned : {true, false}) {
      const size_t count = aligned ? n : 333;
      std::vector<std::vector<float>> in{x, y, z};
      in.resize(size_t(op.operands));
      for (auto& v : in) v.resize(count);
      size_t wrong = 0, first = 0;
      auto compare = [&](auto results) {
        for (size_t k = 0; k < count; ++k) {
          const auto expected = float(kRows[i].f32(x[k], y[k], z[k]));
          const auto got = float(results[k]);
          if (std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(expected)) continue;
          if (got != got && expected != expected) continue;  // NaN has many bits
          if (wrong++ == 0) first = k;
        }
      };
      if (op.to_bool)
        compare(run<float, uint8_t>(text, name, shape_of(op, kF32), in, count, aligned));
      else
        compare(run<float, float>(text, name, shape_of(op, kF32), in, count, aligned));
      EXPECT_EQ(wrong, 0u) << op.name << " of " << x[first] << ", " << y[first] << ", " << z[first];
    }
  }
}

TEST_F(Pointwise, DoublesAndIntegersAgree) {
  const size_t n = 256;
  KernelText doubles{"pointwise", {}}, longs{"pointwise", {}};
  for (size_t i = 0; i < pointwise_ops().size(); ++i) {
    if (kRows[i].f64) doubles.instances.push_back(pointwise_instance(pointwise_ops()[i], kF64));
    if (kRows[i].i64) longs.instances.push_back(pointwise_instance(pointwise_ops()[i], kI64));
  }
  std::vector<double> x(n), y(n), z(n);
  std::vector<long> a(n), b(n), c(n);
  std::mt19937_64 random(5);
  for (size_t i = 0; i < n; ++i) {
    x[i] = double(random() % 3000) * 1e-3 + 0.05, y[i] = double(random() % 300) * 1e-2 + 0.1;
    z[i] = double(random() % 100) * 1e-2;
    a[i] = i % 4 ? long(random() % 100) - 50 : long(random()), b[i] = long(random() % 9) - 9;
    if (b[i] == 0) b[i] = 3;
    c[i] = long(random() % 9);
  }
  for (size_t i = 0; i < pointwise_ops().size(); ++i) {
    const PointwiseOp& op = pointwise_ops()[i];
    if (kRows[i].f64 && !op.to_bool) {
      std::vector<std::vector<double>> in{x, y, z};
      in.resize(size_t(op.operands));
      const auto got = run<double, double>(doubles, std::string(op.name) + "_f64",
                                           shape_of(op, kF64), in, n, true);
      for (size_t k = 0; k < n; ++k) {
        const double expected = kRows[i].f64(x[k], y[k], z[k]);
        if (std::isnan(expected) && std::isnan(got[k])) continue;
        ASSERT_NEAR(got[k], expected, 1e-13 * (1 + std::abs(expected))) << op.name << ' ' << x[k];
      }
    }
    if (kRows[i].i64 && !op.to_bool) {
      std::vector<std::vector<long>> in{a, b, c};
      in.resize(size_t(op.operands));
      const auto got =
          run<long, long>(longs, std::string(op.name) + "_i64", shape_of(op, kI64), in, n, true);
      for (size_t k = 0; k < n; ++k)
        ASSERT_EQ(got[k], std::bit_cast<long>(kRows[i].i64(a[k], b[k], c[k])))
            << op.name << " of " << a[k] << ", " << b[k];
    }
  }
}

TEST_F(Pointwise, NarrowTypesAreComputedWide) {
  const size_t n = 1024;
  const auto x = numbers(n, 1), y = numbers(n, 2);
  const PointwiseOp* add = nullptr;
  const PointwiseOp* gelu = nullptr;
  for (const PointwiseOp& op : pointwise_ops()) {
    if (op.name == "add") add = &op;
    if (op.name == "gelu") gelu = &op;
  }
  KernelText text{"pointwise",
                  {pointwise_instance(*add, kBF16), pointwise_instance(*gelu, kF16),
                   pointwise_instance(*add, kU8), pointwise_instance(*add, kBool),
                   cast_instance(kF32, kBF16), cast_instance(kF16, kF64), cast_instance(kF32, kI32),
                   cast_instance(kI64, kBool), copy_instance(2), where_instance(4)}};
  std::vector<fn::BF16> xb(n), yb(n);
  std::vector<fn::F16> xh(n);
  std::vector<uint8_t> xu(n), yu(n), xo(n), yo(n);
  for (size_t i = 0; i < n; ++i) {
    xb[i] = fn::to_bf16(x[i]), yb[i] = fn::to_bf16(y[i]), xh[i] = fn::to_f16(x[i]);
    xu[i] = uint8_t(i * 7), yu[i] = uint8_t(i * 13), xo[i] = i % 2, yo[i] = i % 3 == 0;
  }
  auto same = [](float a, float b) { return a == b || (a != a && b != b); };
  const auto sums =
      run<fn::BF16, fn::BF16>(text, "add_bf16", shape_of(*add, kBF16), {xb, yb}, n, true);
  const auto gelus = run<fn::F16, fn::F16>(text, "gelu_f16", shape_of(*gelu, kF16), {xh}, n, true);
  const auto bytes = run<uint8_t, uint8_t>(text, "add_u8", shape_of(*add, kU8), {xu, yu}, n, true);
  const auto bools =
      run<uint8_t, uint8_t>(text, "add_bool", shape_of(*add, kBool), {xo, yo}, n, true);
  const auto narrow =
      run<float, fn::BF16>(text, "cast_f32_bf16", shape_of_cast(kF32, kBF16), {x}, n, true);
  const auto wide =
      run<fn::F16, double>(text, "cast_f16_f64", shape_of_cast(kF16, kF64), {xh}, n, true);
  const auto copies = run<fn::F16, fn::F16>(text, "copy_2", shape_of_copy(2), {xh}, n, false);
  for (size_t i = 0; i < n; ++i) {
    ASSERT_TRUE(
        same(fn::widen(sums[i]), fn::widen(fn::to_bf16(fn::widen(xb[i]) + fn::widen(yb[i])))));
    ASSERT_TRUE(same(fn::widen(gelus[i]), fn::widen(fn::to_f16(fn::gelu(fn::widen(xh[i]))))))
        << x[i];
    ASSERT_EQ(bytes[i], uint8_t(xu[i] + yu[i]));
    ASSERT_EQ(bools[i], xo[i] || yo[i]);
    ASSERT_EQ(narrow[i].bits, fn::to_bf16(x[i]).bits);
    ASSERT_TRUE(same(float(wide[i]), fn::widen(xh[i])));
    ASSERT_EQ(copies[i].bits, xh[i].bits);
  }
}

// A nest [5, 6, 8] of operands that are transposed, broadcast along rows and broadcast whole.
TEST_F(Pointwise, StridedAndBroadcastOperands) {
  const PointwiseOp* op = nullptr;
  for (const PointwiseOp& o : pointwise_ops())
    if (o.name == "mul_add") op = &o;
  const KernelText text{"pointwise", {pointwise_instance(*op, kF32)}};
  const int64_t extents[] = {5, 6, 8};
  const auto x = numbers(240, 8);
  std::vector<float> bias(8), one{3.0f};
  for (int i = 0; i < 8; ++i) bias[size_t(i)] = float(i) + 0.25f;
  Array<float> dx(x), dbias(bias), done(one), out(240);
  const int64_t dense[] = {48, 8, 1}, across[] = {1, 5, 30}, row[] = {0, 0, 1}, all[] = {0, 0, 0};
  struct Case {
    std::span<const int64_t> x, y, z;
    bool by_value;
    const char* entry;
  };
  for (const Case& c : {Case{dense, row, all, true, "packs"}, Case{dense, all, row, false, "packs"},
                        Case{across, row, all, true, "elements"}}) {
    const bool y_row = c.y.data() == row;
    std::vector<Strided> operands{
        {out.get(), 4, dense},
        {dx.get(), 4, c.x},
        {y_row ? dbias.get() : done.get(), 4, c.y},
        {y_row ? (c.by_value ? nullptr : done.get()) : dbias.get(), 4, c.z}};
    const unsigned long long values[] = {0, 0, std::bit_cast<uint32_t>(3.0f)};
    const auto launches = pointwise_launches(
        pointwise_walks(shape_of(*op, kF32), extents, operands), operands, values, nullptr);
    ASSERT_EQ(launches.size(), 1u);
    EXPECT_STREQ(launches[0].entry(), c.entry);
    out.fill(0);
    d().launch(d().function(text, std::string("mul_add_f32_") + launches[0].entry()),
               launches[0].geometry, launches[0].call);
    const auto got = out.read();
    for (int64_t i = 0; i < 5; ++i)
      for (int64_t j = 0; j < 6; ++j)
        for (int64_t k = 0; k < 8; ++k) {
          const float v = x[size_t(i * c.x[0] + j * c.x[1] + k * c.x[2])];
          const float b = bias[size_t(k)];
          const float expected = y_row ? v * b + 3.0f : v * 3.0f + b;
          const float g = got[size_t(i * 48 + j * 8 + k)];
          ASSERT_TRUE(g == expected || (g != g && expected != expected)) << i << j << k;
        }
  }
}

TEST_F(Pointwise, DivisionOfIntegersByZeroIsReported) {
  const PointwiseOp* op = nullptr;
  for (const PointwiseOp& o : pointwise_ops())
    if (o.name == "floor_divide") op = &o;
  const KernelText text{"pointwise", {pointwise_instance(*op, kI64)}};
  std::vector<long> x(64, 10), y(64, 3);
  y[41] = 0, y[17] = 0;
  unsigned long long reported = 0;
  const auto r = run<long, long>(text, "floor_divide_i64", shape_of(*op, kI64), {x, y}, 64, true,
                                 false, &reported);
  EXPECT_EQ(refused_of(reported).position, 17);
  EXPECT_EQ(r[0], 3);
}

TEST(Walks, CutWhatThirtyOneBitsCannotCount) {
  const int64_t extents[] = {3, int64_t(1) << 30}, strides[] = {int64_t(1) << 30, 1};
  const Strided operands[] = {{nullptr, 4, strides}, {nullptr, 4, strides}};
  int64_t total = 0, next = 0;
  for (const WalkPiece& p : make_walks(extents, operands, 4)) {
    EXPECT_EQ(p.begin[0], next);
    total += p.walk.count, next += int64_t(p.walk.count) * 4;
  }
  EXPECT_EQ(total * 4, 3 * extents[1]);
  for (uint32_t divisor : {1u, 2u, 3u, 7u, 641u, 65537u, 0x7fffffffu}) {
    const Divisor m = make_divisor(divisor);
    for (uint32_t n : {0u, 1u, divisor - 1, divisor, divisor + 1, 0x7ffffffeu, 0x7fffffffu}) {
      if (n > 0x7fffffffu) continue;
      EXPECT_EQ((n + uint32_t((uint64_t(n) * m.multiplier) >> 32)) >> m.shift, n / divisor)
          << n << " / " << divisor;
    }
  }
}

}  // namespace
}  // namespace tessera::cuda::test
