// Attention in bf16 beside the same values in f32: what pairs of rows and tiles leave over, causal
// or not, heads inside positions or outside, widths that pairs do not fit.
#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/base/parallel.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/tensor/allocator.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

struct Extents {
  int64_t queries, keys, width, value_width;
};

// The root of the mean squared difference, of the values'.
double relative_error(const Tensor& got, const Tensor& want) {
  Tensor d = cast(got, kF64) - cast(want, kF64), w = cast(want, kF64);
  return std::sqrt(sum(d * d).item<double>() / sum(w * w).item<double>());
}

// Values that bf16 holds, [2, 3, rows, width]; `inside`: laid out as [2, rows, 3, width].
Tensor operand(int64_t rows, int64_t width, uint64_t key, bool inside) {
  Tensor x =
      sample_values(inside ? Shape{2, rows, 3, width} : Shape{2, 3, rows, width}, -1, 1, key);
  x = cast(cast(x, kBF16), kF32);
  return inside ? transpose(x, 1, 2) : x;
}

struct Results {
  Tensor out, dq, dk, dv;
};
Results attend(const std::vector<Tensor>& in, bool causal, DType t) {
  Tensor q = cast(in[0], t).requires_grad_(), k = cast(in[1], t).requires_grad_(),
         v = cast(in[2], t).requires_grad_();
  Tensor out = scaled_dot_product_attention(q, k, v, {.causal = causal, .scale = 0.7});
  Tensor(sum(cast(out * cast(in[3], t), kF32))).backward();
  return {out.detach(), q.grad(), k.grad(), v.grad()};
}

// The root of the mean square of a rounding to bf16 is 0.29 units of the last place, 2^-7 of a
// leading digit between 1 and 2: 2^-9.3 of the value. A result carries its own, that of P or dS,
// which entered the product, and dQ and dK that of out, from which delta is: three of independent
// signs are 2^-8.5.
// What dP less delta leaves of dP is sqrt(1 - 1 / keys) where keys weigh the same.
double tolerance(int64_t keys, bool score) {
  return 1.0 / 256 / (score ? std::sqrt(1 - 1 / double(keys)) : 1);
}

TEST(Attention, Bf16IsNearF32) {
  for (auto [t, s, d, e] : {Extents{128, 128, 64, 64},
                            {37, 37, 64, 64},
                            {1, 51, 8, 8},
                            {70, 300, 40, 24},
                            {129, 64, 32, 2},
                            {33, 33, 5, 7},
                            {65, 3, 66, 34}})
    for (bool causal : {false, true})
      for (bool inside : {false, true}) {
        std::vector<Tensor> in = {operand(t, d, 1, inside), operand(s, d, 2, inside),
                                  operand(s, e, 3, inside), operand(t, e, 4, inside)};
        Results low = attend(in, causal, kBF16), wide = attend(in, causal, kF32);
        auto near = [&](const char* what, const Tensor& got, const Tensor& want,
                        bool score = false) {
          EXPECT_EQ(got.dtype(), kBF16);
          EXPECT_LT(relative_error(got, want), tolerance(s, score))
              << what << ' ' << t << ' ' << s << ' ' << d << ' ' << e << ' ' << causal << inside;
        };
        near("out", low.out, wide.out);
        near("dv", low.dv, wide.dv);
        if (s == 1 || (causal && t == 1)) continue;  // one key: gradients of scores are zero
        near("dq", low.dq, wide.dq, true);
        near("dk", low.dk, wide.dk, true);
      }
}

bool all_finite(const Tensor& t) { return amax(abs(cast(t, kF64))).item<double>() < 1e9; }

// The tail of a buffer of keys is masked, and may hold anything.
TEST(Attention, KeysThatNobodySeesDoNotMatter) {
  for (DType t : {kBF16, kF32})
    for (auto [queries, keys] : {std::pair<int64_t, int64_t>{33, 64}, {99, 200}, {1, 4}}) {
      Tensor row = reshape(arange(0, keys), {keys, 1});
      auto with_tail = [&](uint64_t key, double tail) {
        Tensor bad = scalar_tensor(tail, kF32);
        return where(ge(row, queries), bad, operand(keys, 8, key, false)).contiguous();
      };
      std::vector<Tensor> in = {operand(queries, 8, 1, false), with_tail(2, INFINITY),
                                with_tail(3, NAN), operand(queries, 8, 4, false)};
      Results r = attend(in, true, t);
      for (const Tensor& result :
           {r.out, r.dq, slice(r.dk, 2, 0, queries), slice(r.dv, 2, 0, queries)})
        EXPECT_TRUE(all_finite(result)) << name_of(t) << ' ' << queries << ' ' << keys;
    }
}

// The weights are equal, so their sum is exact, and so is that of the values; what rounds is the
// division by the sum.
TEST(Attention, ScoresOfMinusInfinityCountForNothing) {
  for (auto [t, ulp] : {std::pair{kBF16, 0x1p-8}, {kF32, 0x1p-23}, {kF64, 0x1p-52}})
    for (int64_t hidden : {128, 130, 299}) {
      Tensor row = reshape(arange(0, 300), {300, 1});
      Tensor q = ones({1, 1, 40, 8}, {.dtype = t});
      Tensor k =
          cast(where(lt(row, hidden), scalar_tensor(-INFINITY, kF32), ones({1, 1, 300, 8})), t);
      Tensor v = ones({1, 1, 300, 8}, {.dtype = t});
      Tensor out = cast(scaled_dot_product_attention(q, k, v), kF64);
      EXPECT_LE(amax(abs(out - 1.0)).item<double>(), ulp) << name_of(t) << ' ' << hidden;
      Tensor nan = cast(where(eq(row, 5), scalar_tensor(NAN, kF32), cast(k, kF32)), t);
      out = cast(scaled_dot_product_attention(q, nan, v), kF64);
      EXPECT_TRUE(std::isnan(sum(out).item<double>())) << name_of(t) << ' ' << hidden;
    }
}

TEST(Attention, AHeadOfKeysMayServeSeveralOfQueries) {
  const Tensor q = sample_values({2, 6, 5, 8}, -1, 1, 1), k = sample_values({2, 2, 7, 8}, -1, 1, 2),
               v = sample_values({2, 2, 7, 4}, -1, 1, 3);
  const auto each = [](const Tensor& x) {  // heads 0, 0, 0, 1, 1, 1
    const Tensor a = narrow(x, 1, 0, 1), b = narrow(x, 1, 1, 1);
    return cat({a, a, a, b, b, b}, 1);
  };
  for (const AttentionKernel kernel : {AttentionKernel::kFlash, AttentionKernel::kPlain}) {
    const AttentionOptions shared{.causal = true, .enable_gqa = true, .kernel = kernel},
        own{.causal = true, .kernel = kernel};
    const Tensor want = scaled_dot_product_attention(q, each(k), each(v), own);
    EXPECT_TRUE(equal(scaled_dot_product_attention(q, k, v, shared), want));
    EXPECT_TRUE(equal(scaled_dot_product_attention(q[1], k[1], v[1], shared), want[1]));
    EXPECT_TRUE(equal(scaled_dot_product_attention(q, each(k), each(v), shared), want));
    Tensor leaf = k.clone().requires_grad_(), twin = k.clone().requires_grad_();
    sum(square(scaled_dot_product_attention(q, leaf, v, shared))).backward();
    sum(square(scaled_dot_product_attention(q, each(twin), each(v), own))).backward();
    EXPECT_TRUE(allclose(leaf.grad(), twin.grad(), 1e-5, 1e-6));
  }
  EXPECT_THROW(scaled_dot_product_attention(q, k, v), ShapeError);
  const Tensor four = sample_values({2, 4, 7, 8}, -1, 1, 4);
  expect_contains(
      error_of([&] { scaled_dot_product_attention(q, four, four, {.enable_gqa = true}); }),
      "6 heads of q are no multiple of those of");
}

// Bytes that attention holds at most beside its operands.
int64_t held(const std::vector<Tensor>& in) {
  const auto attend = [&] { scaled_dot_product_attention(in[0], in[1], in[2]); };
  attend();  // what is made once
  reset_peak_cpu_memory();
  const int64_t before = cpu_memory_stats().live_bytes;
  attend();
  return cpu_memory_stats().peak_bytes - before;
}

TEST(Attention, OnlyRowsWhoseElementsLieApartAreCopied) {
  std::vector<Tensor> dense, inside, apart;
  for (uint64_t key : {1, 2, 3}) {
    dense.push_back(operand(512, 64, key, false));
    inside.push_back(operand(512, 64, key, true));
    apart.push_back(transpose(contiguous(transpose(dense.back(), 2, 3)), 2, 3));
  }
  const int threads = num_threads();
  set_num_threads(1);  // each has room for tiles, while it works
  const int64_t before = cpu_memory_stats().live_bytes;
  const Tensor copy = clone(dense[0]);
  const int64_t block = cpu_memory_stats().live_bytes - before;  // with guards, if there are any
  EXPECT_EQ(held(inside), held(dense));
  EXPECT_EQ(held(apart), held(dense) + 3 * block);
  set_num_threads(threads);
}

}  // namespace
}  // namespace tessera
