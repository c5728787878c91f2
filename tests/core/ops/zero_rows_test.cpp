// Products without the rows of zeros of an operand equal the whole products.
#include "core/backend/cpu/zero_rows.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/base/isa.h"
#include "core/base/parallel.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

double difference(const Tensor& a, const Tensor& b) {
  return amax(abs(cast(a, kF64) - cast(b, kF64))).item<double>();
}

constexpr int64_t kRows = 700, kWidth = 520, kOther = 512;

// Integers, whose sums are exact in any order, [kRows, kWidth]; every `kept`-th row is not zero.
Tensor sparse_rows(int64_t kept, DType t) {
  Tensor x = cast(floor(sample_values({kRows, kWidth}, -4, 4, 1)) + 8.0, kF32);
  for (int64_t r = 0; r < kRows; ++r)
    if (kept == 0 || r % kept != 0)
      for (int64_t i = 0; i < kWidth; ++i) x.data<float>()[r * kWidth + i] = 0;
  return cast(x, t);
}

cpu::Gemm by_rows(DType t) {  // [kRows, kWidth] [kWidth, kOther]
  cpu::Gemm g;
  g.dtype = t, g.m = kRows, g.n = kOther, g.k = kWidth;
  g.a_m = kWidth, g.a_k = 1, g.b_k = kOther, g.b_n = 1, g.c_m = kOther;
  return g;
}

cpu::Gemm by_columns(DType t) {  // [kRows, kWidth]' [kRows, kOther]
  cpu::Gemm g;
  g.dtype = t, g.m = kWidth, g.n = kOther, g.k = kRows;
  g.a_m = 1, g.a_k = kWidth, g.b_k = kOther, g.b_n = 1, g.c_m = kOther;
  return g;
}

Tensor other(int64_t rows, DType t) {
  return cast(floor(sample_values({rows, kOther}, -4, 4, 2)), t);
}

TEST(ZeroRows, AreLeftOutOfTheResultAndOfItsSums) {
  for (DType t : {kF32, kBF16}) {
    if (t == kBF16 && !cpu::has_bf16_dot()) continue;  // products of bf16 are computed in f32 there
    for (int64_t kept : {0, 7, 1000}) {                // 1000: one row
      const Tensor x = sparse_rows(kept, t), w = other(kWidth, t), y = other(kRows, t);
      const Tensor rows = cast(matmul(cast(x, kF64), cast(w, kF64)), t),
                   sums = cast(matmul(transpose(cast(x, kF64), 0, 1), cast(y, kF64)), t);
      for (int threads : {1, 3}) {
        const int before = num_threads();
        set_num_threads(threads);
        Tensor c = full({kRows, kOther}, 7.0, {t}), d = full({kWidth, kOther}, 7.0, {t});
        EXPECT_TRUE(cpu::GemmWithoutZeroRows(by_rows(t)).run(x.raw(), w.raw(), c.raw()));
        EXPECT_TRUE(cpu::GemmWithoutZeroRows(by_columns(t)).run(x.raw(), y.raw(), d.raw()));
        set_num_threads(before);
        EXPECT_EQ(difference(c, rows), 0.0) << name_of(t) << ' ' << kept << ' ' << threads;
        EXPECT_EQ(difference(d, sums), 0.0) << name_of(t) << ' ' << kept << ' ' << threads;
      }
    }
  }
}

// One plan serves runs that have other numbers of rows left.
TEST(ZeroRows, APlanIsRunAgain) {
  const cpu::GemmWithoutZeroRows rows(by_rows(kF32)), columns(by_columns(kF32));
  for (int64_t kept : {7, 7, 5, 0, 1, 1000, 7}) {
    const Tensor x = sparse_rows(kept, kF32), w = other(kWidth, kF32), y = other(kRows, kF32);
    Tensor c = full({kRows, kOther}, 7.0, {kF32}), d = full({kWidth, kOther}, 7.0, {kF32});
    ASSERT_EQ(rows.run(x.raw(), w.raw(), c.raw()), kept != 1);
    ASSERT_EQ(columns.run(x.raw(), y.raw(), d.raw()), kept != 1);
    if (kept == 1) continue;  // no row is zero
    EXPECT_EQ(difference(c, matmul(x, w)), 0.0) << kept;
    EXPECT_EQ(difference(d, matmul(transpose(x, 0, 1), y)), 0.0) << kept;
  }
}

TEST(ZeroRows, ColumnsOfTheOtherOperandAndRowsApart) {
  const Tensor x = sparse_rows(7, kF32);
  Tensor w = cast(floor(sample_values({kOther, kWidth}, -4, 4, 2)), kF32),
         c = full({kRows, kOther + 3}, 7.0, {kF32});
  cpu::Gemm g = by_rows(kF32);
  g.b_k = 1, g.b_n = kWidth, g.c_m = kOther + 3;
  EXPECT_TRUE(cpu::GemmWithoutZeroRows(g).run(x.raw(), w.raw(), c.raw()));
  EXPECT_EQ(difference(slice(c, 1, 0, kOther), matmul(x, transpose(w, 0, 1))), 0.0);
  EXPECT_EQ(difference(slice(c, 1, kOther, kOther + 3), full({kRows, 3}, 7.0, {kF32})), 0.0);
}

// A zero does not cancel what is not finite.
TEST(ZeroRows, KeepWhatInfinityAndNanMakeOfThem) {
  for (DType t : {kF32, kBF16})
    for (float bad : {INFINITY, -INFINITY, NAN}) {
      const Tensor x = sparse_rows(7, t);
      Tensor y = other(kRows, kF32);
      y.data<float>()[3 * kOther + 5] = bad;  // row 3 of x is zero
      y = cast(y, t);
      Tensor d = full({kWidth, kOther}, 7.0, {t});
      EXPECT_FALSE(cpu::GemmWithoutZeroRows(by_columns(t)).run(x.raw(), y.raw(), d.raw()));
      EXPECT_EQ(difference(d, full({kWidth, kOther}, 7.0, {t})), 0.0) << "C was written";
      Tensor column = cast(select(contract("kw,ko->wo", x, y), 1, 5), kF64);
      for (int64_t i = 0; i < kWidth; ++i) ASSERT_TRUE(std::isnan(column.data<double>()[i]));
    }
}

TEST(ZeroRows, OtherProductsAreLeftAlone) {
  Tensor w = other(kWidth, kF32), c = full({kRows, kOther}, 7.0, {kF32});
  auto takes = [&](const Tensor& x) {
    return cpu::GemmWithoutZeroRows(by_rows(kF32)).run(x.raw(), w.raw(), c.raw());
  };
  EXPECT_FALSE(takes(sparse_rows(1, kF32))) << "no row is zero";
  Tensor first_zero = sparse_rows(1, kF32);  // rows that begin with zeros and are none
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t i = 0; i + 1 < kWidth; ++i) first_zero.data<float>()[r * kWidth + i] = 0;
  EXPECT_FALSE(takes(first_zero));
  EXPECT_EQ(difference(c, full({kRows, kOther}, 7.0, {kF32})), 0.0);
}

}  // namespace
}  // namespace tessera
