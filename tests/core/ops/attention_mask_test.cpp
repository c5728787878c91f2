// Masks in tiled attention beside the plain form, which holds all scores.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "core/autograd/transforms.h"
#include "core/ops/create.h"
#include "core/ops/views.h"
#include "tests/core/ops/attention_forms.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using namespace attention;

struct Named {
  const char* name;
  Tensor mask;
};
// Every dim of a mask on its own and all together; queries and batches that see nothing; a tensor
// whose elements lie apart.
std::vector<Named> masks(int64_t queries, int64_t keys) {
  const auto drawn = [&](const Shape& s) { return sample_values(s, -1, 1, 9); };
  const auto sees = [&](const Shape& s) { return gt(drawn(s), -0.4); };
  const Tensor lengths =
                   reshape(from_values<int64_t>({keys, keys / 3}, {kBatch}), {kBatch, 1, 1, 1}),
               key = reshape(arange(0, keys), {1, 1, 1, keys});
  const Tensor additive = drawn({kBatch, kHeads, queries, keys});
  return {{"padding", lt(key, lengths)},
          {"a sequence of padding alone", lt(key, lengths - keys / 3)},
          {"by key", sees({keys})},
          {"by query", sees({queries, 1})},
          {"by head", sees({kHeads, 1, 1})},
          {"by batch", sees({kBatch, 1, 1, 1})},
          {"all", sees({kBatch, kHeads, queries, keys})},
          {"nothing", zeros({1, 1}, {.dtype = kBool})},
          {"turned", transpose(sees({kHeads, keys, queries}), 1, 2)},
          {"numbers", additive},
          {"numbers by head", drawn({kHeads, queries, keys})},
          {"numbers in f32", cast(drawn({queries, keys}), kF32)},
          {"numbers and -inf", where(gt(additive, 0.9), additive, scalar_tensor(-INFINITY, kF64))}};
}

TEST(AttentionMask, IsThatOfThePlainForm) {
  for (auto [queries, keys, width, value_width] :
       {std::array<int64_t, 4>{9, 9, 8, 8}, {5, 3, 4, 6}, {33, 150, 8, 4}, {17, 300, 16, 8}})
    for (const auto& [name, mask] : masks(queries, keys))
      for (bool causal : {false, true}) {
        SCOPED_TRACE(fmt::format("{} {} {} {}", name, queries, keys, causal));
        expect_plain(operands_of(queries, keys, width, value_width),
                     {.mask = mask, .causal = causal, .scale = 0.7}, 1e-12);
      }
}
TEST(AttentionMask, InF32) {
  for (const auto& [name, mask] : masks(37, 200)) {
    SCOPED_TRACE(name);
    expect_plain(operands_of(37, 200, 16, 8, kF32),
                 {.mask = mask.dtype() == kF64 ? cast(mask, kF32) : mask}, 4e-6);
  }
}

// 16-bit floats: beside the same values in f32, whose rounding is 2^-9 of a result, and of the
// weights that enter its products.
TEST(AttentionMask, In16Bits) {
  for (DType t : {kBF16, kF16})
    for (int64_t width : {16, 7})  // in pairs, and not
      for (const auto& [name, mask] : masks(37, 200)) {
        SCOPED_TRACE(fmt::format("{} {} {}", name, name_of(t), width));
        const AttentionOptions o{.mask = mask.dtype() == kF64 ? cast(mask, kF32) : mask};
        expect_wide(operands_of(37, 200, width, width + width % 2, t), o, 0x1p-8);
      }
}

TEST(AttentionMask, AQueryThatSeesNoKeyGetsZeros) {
  const Tensor mask = ne(reshape(arange(0, 40), {40, 1}), 7);
  for (DType t : {kF64, kF32, kBF16, kF16}) {
    const List got = attend(operands_of(40, 200, 8, 8, t), {.mask = mask});
    for (const Tensor& of_query : {got[0], got[1]}) {
      EXPECT_EQ(amax(abs(cast(select(of_query, 2, 7), kF64))).item<double>(), 0) << name_of(t);
      EXPECT_GT(amin(amax(abs(cast(select(of_query, 2, 8), kF64)), {-1})).item<double>(), 0);
    }
    for (const Tensor& of_key : {got[2], got[3]})
      EXPECT_FALSE(std::isnan(sum(cast(of_key, kF64)).item<double>())) << name_of(t);
  }
}

// Programs write several numbers for -inf. Both forms take what is below -60000 for it.
TEST(AttentionMask, LowNumbersAreNone) {
  const Tensor sees =
      gt(sample_values({kHeads, 40, 200}, -1, 1, 9), -0.4) & ne(reshape(arange(0, 40), {40, 1}), 7);
  for (DType t : {kF64, kF32, kBF16, kF16})
    for (AttentionKernel kernel : {AttentionKernel::kFlash, AttentionKernel::kPlain}) {
      const auto with = [&](double low) {
        return attend(operands_of(40, 200, 8, 8, t),
                      {.mask = where(sees, 0.5, scalar_tensor(low, t == kF16 ? kF16 : kF32)),
                       .kernel = kernel});
      };
      const List want = with(-INFINITY);
      for (double low : {-65504.0, -1e9, double(std::numeric_limits<float>::lowest())}) {
        const List got = with(low);
        for (size_t i = 0; i < want.size(); ++i)
          EXPECT_TRUE(equal(got[i], want[i])) << name_of(t) << ' ' << low << ' ' << i;
      }
    }
}
// A row of such numbers alone gives zeros, and one number above them all of the weight.
TEST(AttentionMask, TheLowestNumberThatCounts) {
  const List in = operands_of(4, 6, 4, 4);
  const Tensor key = arange(0, 6);
  for (double least : {-60000.0, -60001.0})
    expect_plain(in,
                 {.mask = where(eq(key, 2), scalar_tensor(least, kF64), scalar_tensor(-1e9, kF64))},
                 1e-13);
}

// A tile of keys that no query sees is not multiplied, so that it may hold anything.
TEST(AttentionMask, TilesOfPaddingAreSkipped) {
  for (DType t : {kF64, kF32, kBF16}) {
    List in = operands_of(20, 300, 8, 8, t);
    const Tensor real = lt(arange(0, 300), 100), column = reshape(arange(0, 300), {300, 1});
    for (size_t i : {1, 2})
      in[i] = cast(where(lt(column, 128), cast(in[i], kF32), scalar_tensor(NAN, kF32)), t);
    for (const Tensor& x : attend(in, {.mask = real}))
      EXPECT_FALSE(std::isnan(sum(cast(x, kF64)).item<double>())) << name_of(t);
  }
}

TEST(AttentionMask, OfNumbersHasAGradient) {
  for (const Shape& s :
       {Shape{kBatch, kHeads, 9, 7}, {kHeads, 9, 7}, {9, 7}, {kBatch, 1, 1, 7}, {1}})
    for (bool causal : {false, true}) {
      Tensor mask = sample_values(s, -1, 1, 5).requires_grad_();
      expect_plain(operands_of(9, 7, 4, 6), {.mask = mask, .causal = causal}, 1e-13);
    }
}

TEST(AttentionMask, HasSecondDerivatives) {
  const List in = operands_of(6, 5, 4, 4);
  for (bool learned : {false, true}) {
    Tensor mask = learned ? sample_values({kHeads, 6, 5}, -1, 1, 5)
                          : gt(sample_values({kBatch, 1, 1, 5}, -1, 1, 5), -0.5);
    if (learned) mask.requires_grad_();
    expect_plain_second(in, {.mask = mask}, learned ? "learned" : "padding");
  }
}

TEST(AttentionMask, OfSamplesIsBatched) {
  constexpr int64_t kSamples = 4;
  const auto of = [&](uint64_t key, int64_t rows) {
    return sample_values({kSamples, kBatch, kHeads, rows, 4}, -1, 1, key);
  };
  const Tensor q = of(1, 6), k = of(2, 5), v = of(3, 5);
  const auto f = [](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask) {
    return scaled_dot_product_attention(q, k, v, {.mask = mask});
  };
  for (const Shape& s : {Shape{1, 1, 1, 5}, {kBatch, 1, 1, 5}, {1, kHeads, 6, 5}, {6, 5}})
    for (bool own : {false, true}) {
      SCOPED_TRACE(fmt::format("{} {}", to_string(s), own));
      Shape all = s;
      if (own) all.insert(0, kSamples);
      const Tensor mask = gt(sample_values(all, -1, 1, 4), -0.5);
      const auto by_sample =
          vmap(f, {.in_dims = {0, 0, 0, own ? std::optional<int>(0) : std::nullopt}});
      Tensor got;
      {
        test::CountedOps ops;
        got = by_sample(q, k, v, mask);
        EXPECT_EQ(ops.of("attention"), 1);
      }
      for (int64_t i = 0; i < kSamples; ++i)
        sweep::expect_close(got[i], f(q[i], k[i], v[i], own ? mask[i] : mask), 1e-14, "sample");
    }
}

TEST(AttentionMask, HoldsNoScores) {
  expect_no_scores(
      {{.mask = ones({kBatch, 1, 1, 512}, {.dtype = kBool})}, {.mask = ones({kHeads, 512, 512})}});
}

TEST(AttentionMask, ThatDoesNotFitIsRefused) {
  const List in = operands_of(6, 5, 4, 4);
  const auto error = [&](const Tensor& mask) {
    return error_of([&] { scaled_dot_product_attention(in[0], in[1], in[2], {.mask = mask}); });
  };
  expect_contains(error(ones({5, 6})), "f32[5, 6] does not broadcast to scores [2, 3, 6, 5]");
  expect_contains(error(ones({1, 2, 3, 6, 5})), "does not broadcast to scores");
  expect_contains(error(zeros({6, 5}, {.dtype = kI64})), "i64[6, 5]; give bools");
}

}  // namespace
}  // namespace tessera
