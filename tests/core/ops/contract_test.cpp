// Contractions of operands with unusual strides, against the same operands made dense.
#include "core/ops/contract.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "core/backend/cpu/gemm.h"
#include "core/base/isa.h"
#include "core/base/parallel.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

double difference(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(to_string(a.shape()), to_string(b.shape()));
  return amax(abs(cast(a, kF64) - cast(b, kF64))).item<double>();
}

Tensor values(const Shape& shape, uint64_t key, DType t) {
  return cast(sample_values(shape, -1, 1, key), t);
}

TEST(Contract, ExpandedOperandsEqualDenseOnes) {
  for (DType t : {kF64, kF32}) {
    double tolerance = t == kF64 ? 1e-12 : 1e-5;
    Tensor row = expand(values({1, 3}, 1, t), {4, 3}),
           column = expand(values({4, 1}, 2, t), {4, 3});
    Tensor w = values({3, 2}, 3, t);
    for (const Tensor& x : {row, column})
      EXPECT_LT(difference(matmul(x, w), matmul(clone(x), w)), tolerance);
    Tensor batched = expand(values({1, 16, 8}, 4, t), {4, 16, 8}), weight = values({5, 8}, 5, t);
    EXPECT_LT(difference(linear(batched, weight), linear(clone(batched), weight)), tolerance);
  }
}

TEST(Contract, GradientOfAMeanOverTokens) {
  for (DType t : {kF64, kF32}) {
    Tensor x = values({32, 16, 8}, 1, t), w = values({5, 8}, 2, t);
    w.requires_grad_();
    sum(square(mean(linear(x, w), {1}))).backward();
    Tensor g = w.grad();
    // d/dw of sum((m w')^2) with m the mean over tokens is 2 (m w')' m.
    Tensor m = mean(x, {1}), y = linear(m, w.detach());
    EXPECT_LT(difference(g, matmul(transpose(y, 0, 1), m) * 2.0), t == kF64 ? 1e-12 : 1e-4);
  }
}

TEST(Matmul, BatchDimsOfUnequalNumberAndExtentBroadcast) {
  for (auto [sa, sb] : {std::pair<Shape, Shape>{{1, 4, 6}, {3, 5, 6, 7}},
                        {{3, 5, 4, 6}, {1, 6, 7}},
                        {{2, 1, 4, 6}, {3, 6, 7}},
                        {{6}, {3, 6, 7}},
                        {{2, 3, 4, 6}, {6}}}) {
    Tensor a = values(sa, 1, kF64), b = values(sb, 2, kF64), c = matmul(a, b);
    // Elementwise: align both to [.., m, k, n] and sum over k.
    Tensor left = a.ndim() == 1 ? unsqueeze(unsqueeze(a, 0), -1) : unsqueeze(a, -1);
    Tensor right = b.ndim() == 1 ? unsqueeze(unsqueeze(b, 0), -1) : unsqueeze(b, -3);
    Tensor reference = sum(left * right, {-2});
    EXPECT_LT(difference(c, reshape(reference, c.shape())), 1e-12);
  }
}

TEST(Contract, BatchLetterLast) {
  for (DType t : {kF64, kF32}) {
    Tensor a = values({2, 3, 4}, 1, t), b = values({3, 5, 4}, 2, t);
    Tensor reference =
        permute(contract("bij,bjk->bik", permute(a, {2, 0, 1}), permute(b, {2, 0, 1})), {1, 2, 0});
    EXPECT_LT(difference(contract("ijb,jkb->ikb", a, b), reference), t == kF64 ? 1e-12 : 1e-5);
  }
}

TEST(Contract, LettersOfOneOperandAreSummed) {
  const Tensor a = values({2, 3}, 1, kF64), b = values({3, 4}, 2, kF64);
  const Tensor product = matmul(a, b);
  EXPECT_LT(difference(contract("ij,jk->k", a, b), sum(product, {0})), 1e-14);
  EXPECT_LT(difference(contract("ij,jk->i", a, b), sum(product, {1})), 1e-14);
  EXPECT_LT(difference(contract("ij,jk->", a, b), sum(product)), 1e-14);
  const Tensor rows = sum(a, {1}), columns = sum(b, {0});
  EXPECT_LT(difference(contract("ij,lk->ik", a, b), unsqueeze(rows, 1) * unsqueeze(columns, 0)),
            1e-14);
}

// One element by the definition: chains of multiply-adds over the leaves, a balanced tree over
// them.
template <class T>
T chain(const T* a, int64_t a_k, const T* b, int64_t b_k, int64_t k, int64_t leaves) {
  if (leaves > 1) {
    int64_t half = k / 2;
    T low = chain(a, a_k, b, b_k, half, leaves / 2);
    return low + chain(a + half * a_k, a_k, b + half * b_k, b_k, half, leaves / 2);
  }
  T sum = 0;
  for (int64_t p = 0; p < k; ++p)
    sum = cpu::current_isa() == cpu::Isa::kBase ? a[p * a_k] * b[p * b_k] + sum
                                                : std::fma(a[p * a_k], b[p * b_k], sum);
  return sum;
}

// Rows and columns beyond one tile, tails of every kind, leaves longer than a panel, either order
// of both operands.
template <class T>
void expect_exact_bits() {
  for (auto [m, k, n] : {std::tuple<int64_t, int64_t, int64_t>{1, 8, 1},
                         {3, 7, 5},
                         {17, 24, 33},
                         {250, 40, 131},
                         {13, 1100, 19},
                         {2, 4, 300},
                         {241, 1, 129},
                         {5, 2096, 1}})
    for (bool a_rows : {true, false})
      for (bool b_rows : {true, false}) {
        Tensor x = values(a_rows ? Shape{m, k} : Shape{k, m}, 1, dtype_of<T>),
               y = values(b_rows ? Shape{k, n} : Shape{n, k}, 2, dtype_of<T>);
        if (!a_rows) x = transpose(x, 0, 1);
        if (!b_rows) y = transpose(y, 0, 1);
        ExactContraction exact;
        Tensor z = contiguous(matmul(x, y));
        int64_t leaves = std::gcd(k, kExactLeaves), wrong = 0;
        for (int64_t i = 0; i < m; ++i)
          for (int64_t j = 0; j < n; ++j)
            wrong += z.data<T>()[i * n + j] !=
                     chain(x.data<T>() + i * x.strides()[0], x.strides()[1],
                           y.data<T>() + j * y.strides()[1], y.strides()[0], k, leaves);
        EXPECT_EQ(wrong, 0) << m << ' ' << k << ' ' << n << ' ' << a_rows << b_rows;
      }
}
TEST(ExactContraction, ElementsHaveTheBitsOfTheDefinition) {
  expect_exact_bits<float>();
  expect_exact_bits<double>();
}

// The packed product by the same definition with one leaf: several blocks of k, groups of rows and
// tiles for threads, tails of all. Columns beside the result stay.
TEST(PackedGemm, AnElementIsOneChain) {
  for (auto [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{70, 75, 90},
                         {521, 65, 300},
                         {1030, 40, 150},
                         {9, 530, 700},
                         {64, 97, 2000},
                         {70, 96, 700}})
    for (bool a_rows : {true, false})
      for (bool b_rows : {true, false})
        for (int threads : {1, 3}) {
          Tensor a = values({m * k}, 1, kF32), b = values({k * n}, 2, kF32),
                 c = full({m, n + 3}, 7.0, {kF32});
          cpu::Gemm g;
          g.m = m, g.n = n, g.k = k, g.c_m = n + 3;
          g.a_m = a_rows ? k : 1, g.a_k = a_rows ? 1 : m;
          g.b_k = b_rows ? n : 1, g.b_n = b_rows ? 1 : k;
          const int before = num_threads();
          set_num_threads(threads);
          Tensor work = empty({int64_t(cpu::packed_gemm_workspace(g, 0))}, kU8);
          cpu::run_packed_gemm(g, 0, a.raw(), b.raw(), c.raw(), work.raw());
          set_num_threads(before);
          int64_t wrong = 0;
          for (int64_t i = 0; i < m; ++i)
            for (int64_t j = 0; j < n + 3; ++j)
              wrong += c.data<float>()[i * (n + 3) + j] !=
                       (j < n ? chain(a.data<float>() + i * g.a_m, g.a_k,
                                      b.data<float>() + j * g.b_n, g.b_k, k, 1)
                              : 7.0f);
          EXPECT_EQ(wrong, 0) << m << ' ' << n << ' ' << k << ' ' << a_rows << b_rows << threads;
        }
}

// Products of bf16 in f32 sums: exact for small integers, which every order sums alike, up to one
// rounding of each element; and near the product of the same values in f32 for others. Columns
// beside the result stay.
TEST(PackedGemm, PairsOfBf16AreSummedInF32) {
  if (!cpu::has_bf16_dot()) GTEST_SKIP() << "this CPU has no bf16 dot instructions";
  for (auto [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{70, 75, 90},
                         {521, 65, 300},
                         {1030, 40, 150},
                         {9, 530, 3300},
                         {64, 97, 4000},
                         {3, 2, 2}})
    for (bool a_rows : {true, false})
      for (bool b_rows : {true, false})
        for (bool integers : {true, false}) {
          auto draw = [&](int64_t count, uint64_t key) {
            Tensor x = sample_values({count}, -4, 4, key);
            return cast(integers ? floor(x) : x, kBF16);
          };
          Tensor a = draw(m * k, 1), b = draw(k * n, 2), c = full({m, n + 3}, 7.0, {kBF16});
          cpu::Gemm g;
          g.dtype = kBF16, g.m = m, g.n = n, g.k = k, g.c_m = n + 3;
          g.a_m = a_rows ? k : 1, g.a_k = a_rows ? 1 : m;
          g.b_k = b_rows ? n : 1, g.b_n = b_rows ? 1 : k;
          ASSERT_TRUE(cpu::packed_gemm_takes(g));
          Tensor work = empty({int64_t(cpu::packed_gemm_workspace(g, 0))}, kU8);
          cpu::run_packed_gemm(g, 0, a.raw(), b.raw(), c.raw(), work.raw());
          Tensor x = cast(a_rows ? reshape(a, {m, k}) : transpose(reshape(a, {k, m}), 0, 1), kF64),
                 y = cast(b_rows ? reshape(b, {k, n}) : transpose(reshape(b, {n, k}), 0, 1), kF64);
          Tensor want = matmul(x, y), got = cast(slice(c, 1, 0, n), kF64);
          // Half a unit in the last of 8 digits, and the sums' own error.
          Tensor bound = abs(want) * (1.0 / 256) + (integers ? 0.0 : 1e-6 * double(k) * 16);
          EXPECT_LE(amax(abs(got - want) - bound).item<double>(), 0.0)
              << m << ' ' << n << ' ' << k << ' ' << a_rows << b_rows << integers;
          Tensor rounded = cast(cast(want, kBF16), kF64);
          EXPECT_EQ(integers ? difference(got, rounded) : 0.0, 0.0);
          EXPECT_EQ(difference(slice(c, 1, n, n + 3), full({m, 3}, 7.0, {kBF16})), 0.0);
        }
}

TEST(PackedGemm, Bf16NeedsPairsInEveryRow) {
  cpu::Gemm g;
  g.dtype = kBF16, g.m = g.n = 64, g.k = 64, g.a_m = 64, g.a_k = 1, g.b_k = 64, g.b_n = 1;
  EXPECT_EQ(cpu::packed_gemm_takes(g), cpu::has_bf16_dot());
  g.a_m = 65;
  EXPECT_FALSE(cpu::packed_gemm_takes(g));
  g.a_m = 64, g.k = 63;
  EXPECT_FALSE(cpu::packed_gemm_takes(g));
}

TEST(ExactContraction, GradientsAreExactOutsideOfTheScope) {
  Tensor x = values({6, 16}, 1, kF32).requires_grad_(), w = values({24, 16}, 2, kF32);
  Tensor y, g = values({6, 24}, 3, kF32);
  {
    ExactContraction exact;
    y = linear(x, w);
  }
  sum(y * g).backward();
  ExactContraction exact;
  Tensor want = matmul(g, w);
  EXPECT_EQ(std::memcmp(x.grad().raw(), want.raw(), want.nbytes()), 0);
}

TEST(Contract, DisagreeingExtentsNameTheLetter) {
  try {
    contract("ij,jk->ik", ones({2, 3}), ones({4, 5}));
    FAIL();
  } catch (const ShapeError& e) {
    EXPECT_NE(std::string(e.what()).find("'j'"), std::string::npos) << e.what();
  }
}

TEST(Empty, SizesThatOverflowAreRefused) {
  EXPECT_THROW(empty({int64_t(1) << 40, int64_t(1) << 40}), ShapeError);
  EXPECT_THROW(zeros({int64_t(1) << 61}, {kF64}), ShapeError);
  EXPECT_EQ(empty({int64_t(1) << 40, 0, int64_t(1) << 40}).numel(), 0);
}

}  // namespace
}  // namespace tessera
