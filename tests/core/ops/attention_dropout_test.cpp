// Dropout in tiled attention beside the plain form, which holds all scores.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "core/autograd/autocast.h"
#include "core/autograd/recompute.h"
#include "core/autograd/transforms.h"
#include "core/base/parallel.h"
#include "core/ops/create.h"
#include "core/ops/views.h"
#include "tests/core/ops/attention_forms.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using namespace attention;

constexpr double kDropped = 0.3;

// Tiles have 16 queries and 128 keys. Words come by fours, so rows of keys that are no multiple of
// 4 begin inside of a four.
TEST(AttentionDropout, IsThatOfThePlainForm) {
  for (auto [queries, keys, width, value_width] : {std::array<int64_t, 4>{1, 1, 1, 1},
                                                   {1, 5, 4, 6},
                                                   {5, 1, 4, 6},
                                                   {9, 8, 8, 8},
                                                   {17, 131, 8, 4},
                                                   {33, 300, 16, 7}})
    for (bool causal : {false, true})
      for (double p : {0.1, 0.9}) {
        SCOPED_TRACE(fmt::format("{} {} {} {}", queries, keys, causal, p));
        expect_plain(operands_of(queries, keys, width, value_width),
                     {.causal = causal, .scale = 0.7, .dropout = p}, 1e-13);
      }
}
TEST(AttentionDropout, WithMasks) {
  const Tensor drawn = sample_values({kBatch, kHeads, 20, 150}, -1, 1, 9),
               lengths = reshape(from_values<int64_t>({140, 0}, {kBatch}), {kBatch, 1, 1, 1});
  for (const Tensor& mask : {lt(arange(0, 150), lengths), gt(drawn, -0.4), drawn,
                             where(gt(drawn, 0.9), drawn, scalar_tensor(-INFINITY, kF64))})
    for (bool causal : {false, true})
      expect_plain(operands_of(20, 150, 8, 4),
                   {.mask = mask, .causal = causal, .dropout = kDropped}, 1e-13);
}
TEST(AttentionDropout, InF32) {
  for (int64_t keys : {200, 203})
    for (bool causal : {false, true})
      expect_plain(operands_of(37, keys, 16, 8, kF32), {.causal = causal, .dropout = kDropped},
                   4e-6);
}

// 16-bit floats: beside the same values in f32, whose rounding is 2^-9 of a result, and of the
// weights that enter its products; results are up to 1 / 0.7 times as large.
TEST(AttentionDropout, In16Bits) {
  for (DType t : {kBF16, kF16})
    for (int64_t width : {16, 7})  // in pairs, and not
      for (int64_t keys : {64, 201}) {
        SCOPED_TRACE(fmt::format("{} {} {}", name_of(t), width, keys));
        expect_wide(operands_of(37, keys, width, width + width % 2, t), {.dropout = kDropped},
                    0x1.8p-8);
      }
}

// Values of an identity show the weights themselves.
TEST(AttentionDropout, DropsWhatTheOpDropoutDrops) {
  for (DType t : {kF64, kF32, kBF16, kF16})
    for (int64_t keys : {60, 130, 151})
      for (bool by_sample : {false, true}) {
        SCOPED_TRACE(fmt::format("{} {} {}", name_of(t), keys, by_sample));
        std::optional<SampleScope> scope;
        if (by_sample) scope.emplace(from_values<int64_t>({41, 7}, {2}));
        const List in = operands_of(33, keys, 6, keys, t);
        const Tensor values = expand(cast(eq(unsqueeze(arange(0, keys), 1), arange(0, keys)), t),
                                     {kBatch, kHeads, keys, keys});
        manual_seed(5);
        const Tensor got =
            scaled_dot_product_attention(in[0], in[1], values, {.scale = 0.1, .dropout = kDropped});
        manual_seed(5);
        const Tensor want = dropout(ones({kBatch, kHeads, 33, keys}), kDropped);
        EXPECT_TRUE(equal(eq(got, 0), eq(want, 0)));
        const double share = mean(cast(eq(want, 0), kF64)).item<double>();
        EXPECT_NEAR(share, kDropped, 0.02);
      }
}
TEST(AttentionDropout, BySampleIsThatOfThePlainForm) {
  for (int64_t samples : {1, 2}) {  // of two rows each, or of one
    SampleScope scope(slice(from_values<int64_t>({41, 7}, {2}), 0, 0, samples));
    expect_plain(operands_of(9, 131, 8, 8), {.causal = true, .dropout = kDropped}, 1e-13);
  }
}
TEST(AttentionDropout, OfASampleIsTheSameInAnyBatch) {
  const List in = operands_of(9, 30, 8, 8);
  const auto rows = [&](std::initializer_list<int64_t> numbers, int64_t first, int64_t count) {
    SampleScope scope(from_values<int64_t>(numbers, {count}));
    List part;
    for (const Tensor& x : in) part.push_back(narrow(x, 0, first, count));
    return attend(part, {.dropout = kDropped});
  };
  const List both = rows({41, 7}, 0, 2), second = rows({7}, 1, 1), other = rows({8}, 1, 1);
  for (size_t i = 0; i < both.size(); ++i) {
    EXPECT_TRUE(equal(narrow(both[i], 0, 1, 1), second[i])) << i;
    EXPECT_FALSE(equal(other[i], second[i])) << i;
  }
}

TEST(AttentionDropout, DoesNotDependOnThreads) {
  const int threads = num_threads();
  for (DType t : {kF64, kF32, kBF16, kF16}) {
    const List in = operands_of(40, 151, 8, 8, t);
    set_num_threads(1);
    const List want = attend(in, {.causal = true, .dropout = kDropped});
    for (int n : {2, 3}) {
      set_num_threads(n);
      const List got = attend(in, {.causal = true, .dropout = kDropped});
      for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(equal(got[i], want[i])) << n << ' ' << i;
    }
  }
  set_num_threads(threads);
}

TEST(AttentionDropout, TakesOneKeyOfTheGenerator) {
  const List in = operands_of(4, 4, 4, 4);
  const auto next = [&](AttentionKernel kernel, double p) {
    manual_seed(5);
    scaled_dot_product_attention(in[0], in[1], in[2], {.dropout = p, .kernel = kernel});
    return default_generator().next_key();
  };
  for (double p : {0.0, 0.3, 1.0})
    EXPECT_TRUE(equal(next(AttentionKernel::kFlash, p), next(AttentionKernel::kPlain, p))) << p;
}

TEST(AttentionDropout, OfAllLeavesZeros) {
  for (AttentionKernel kernel : {AttentionKernel::kAuto, AttentionKernel::kPlain})
    for (const Tensor& x : attend(operands_of(5, 6, 4, 4), {.dropout = 1, .kernel = kernel}))
      EXPECT_EQ(amax(abs(x)).item<double>(), 0);
}
TEST(AttentionDropout, OutsideOfZeroAndOneIsRefused) {
  const List in = operands_of(5, 6, 4, 4);
  for (double p : {-0.1, 1.1, double(NAN)})
    for (AttentionKernel kernel : {AttentionKernel::kAuto, AttentionKernel::kPlain})
      expect_contains(error_of([&] {
                        scaled_dot_product_attention(in[0], in[1], in[2],
                                                     {.dropout = p, .kernel = kernel});
                      }),
                      "expected 0 <= p <= 1");
}

TEST(AttentionDropout, OfAMaskOfNumbersHasAGradient) {
  for (const Shape& s : {Shape{kBatch, kHeads, 9, 7}, {9, 7}, {kBatch, 1, 1, 7}}) {
    Tensor mask = sample_values(s, -1, 1, 5).requires_grad_();
    expect_plain(operands_of(9, 7, 4, 6), {.mask = mask, .causal = true, .dropout = kDropped},
                 1e-13);
  }
}

TEST(AttentionDropout, HasSecondDerivatives) {
  expect_plain_second(
      operands_of(6, 5, 4, 4),
      {.mask = gt(sample_values({kBatch, 1, 1, 5}, -1, 1, 5), -0.5), .dropout = kDropped},
      "second derivatives");
}

TEST(AttentionDropout, IsDrawnAgainWhereTheForwardPassIs) {
  const List in = operands_of(20, 131, 8, 8);
  const auto f = [](const Tensor& q, const Tensor& k, const Tensor& v) {
    return scaled_dot_product_attention(q, k, v, {.dropout = kDropped});
  };
  const auto gradients = [&](bool again) {
    manual_seed(5);
    const List leaves = leaves_of(in);
    const Tensor y =
        again ? recompute(f, leaves[0], leaves[1], leaves[2]) : f(leaves[0], leaves[1], leaves[2]);
    const Tensors all = grad({&y, 1}, leaves, {&in[3], 1});
    return List(all.begin(), all.end());
  };
  const List got = gradients(true), want = gradients(false);
  for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(equal(got[i], want[i])) << i;
}

TEST(AttentionDropout, UnderAutocastIsThatOfLowFloats) {
  const List in = operands_of(20, 64, 8, 8, kF32);
  List low;
  for (const Tensor& x : in) low.push_back(cast(x, kBF16));
  manual_seed(5);
  Autocast on(kBF16);
  const Tensor got = scaled_dot_product_attention(in[0], in[1], in[2], {.dropout = kDropped});
  EXPECT_TRUE(equal(got, attend(low, {.dropout = kDropped})[0]));
}

// ---- vmap

constexpr int64_t kSamples = 4;

struct Batch {
  Tensor q, k, v, mask;
};
Batch batch() {
  const auto of = [&](uint64_t key, int64_t rows) {
    return sample_values({kSamples, kBatch, kHeads, rows, 4}, -1, 1, key);
  };
  return {of(1, 6), of(2, 5), of(3, 5), gt(sample_values({kSamples, 1, 1, 1, 5}, -1, 1, 4), -0.5)};
}
// The result and its gradient by q, of samples `in_dims` of the four operands.
List mapped(AttentionKernel kernel, const std::vector<BatchDim>& in_dims, Randomness randomness,
            const Batch& b, int64_t* calls = nullptr) {
  manual_seed(5);
  const auto f = [=](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask) {
    return scaled_dot_product_attention(
        q, k, v, {.mask = mask, .causal = true, .dropout = kDropped, .kernel = kernel});
  };
  Tensor q = b.q.detach().requires_grad_();
  test::CountedOps ops;
  const Tensor y = vmap(f, {.in_dims = in_dims, .randomness = randomness})(q, b.k, b.v, b.mask);
  if (calls) *calls = ops.of("attention");
  const Tensor loss = sum(square(y));
  return {y.detach(), grad({&loss, 1}, {&q, 1})[0]};
}
TEST(AttentionDropout, OfSamplesIsBatched) {
  const Batch all = batch(), shared{all.q, all.k[0], all.v[0], all.mask[0]};
  const std::vector<BatchDim> each{0, 0, 0, 0}, own{0, std::nullopt, std::nullopt, std::nullopt};
  for (Randomness randomness : {Randomness::kSame, Randomness::kDifferent})
    for (bool few : {false, true}) {
      SCOPED_TRACE(fmt::format("{} {}", int(randomness), few));
      int64_t calls = 0;
      const Batch& b = few ? shared : all;
      const auto& dims = few ? own : each;
      sweep::expect_close(mapped(AttentionKernel::kFlash, dims, randomness, b, &calls),
                          mapped(AttentionKernel::kPlain, dims, randomness, b), 1e-13, "results");
      EXPECT_EQ(calls, 1);
    }
  expect_contains(error_of([&] { mapped(AttentionKernel::kFlash, each, Randomness::kError, all); }),
                  "Randomness::kDifferent");
}
// No operand has samples, and yet they differ.
TEST(AttentionDropout, OfSamplesThatShareAllIsDrawnForEach) {
  const List in = operands_of(6, 5, 4, 4);
  const auto results = [&](AttentionKernel kernel, Randomness randomness) {
    manual_seed(5);
    return vmap(
        [&](const Tensor& x) {
          return scaled_dot_product_attention(in[0], in[1], in[2],
                                              {.dropout = kDropped, .kernel = kernel}) +
                 x;
        },
        {.randomness = randomness})(zeros({kSamples}, {.dtype = kF64}));
  };
  for (Randomness randomness : {Randomness::kSame, Randomness::kDifferent}) {
    const Tensor got = results(AttentionKernel::kFlash, randomness);
    sweep::expect_close(got, results(AttentionKernel::kPlain, randomness), 1e-13, "results");
    EXPECT_EQ(equal(got[0], got[1]), randomness == Randomness::kSame);
  }
}
// The function numbers what is a batch to it.
TEST(AttentionDropout, BySampleIsBatched) {
  const Batch all = batch();
  const auto f = [](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask) {
    SampleScope scope(from_values<int64_t>({41, 7}, {2}));
    return scaled_dot_product_attention(q, k, v,
                                        {.mask = mask, .causal = true, .dropout = kDropped});
  };
  manual_seed(5);
  Tensor got;
  {
    test::CountedOps ops;
    got = vmap(f)(all.q, all.k, all.v, all.mask);
    EXPECT_EQ(ops.of("attention"), 1);
  }
  for (int64_t i = 0; i < kSamples; ++i) {
    manual_seed(5);
    sweep::expect_close(got[i], f(all.q[i], all.k[i], all.v[i], all.mask[i]), 1e-14, "sample");
  }
}

// ---- memory

TEST(AttentionDropout, HoldsNoScores) { expect_no_scores({{.dropout = kDropped}}); }

}  // namespace
}  // namespace tessera
