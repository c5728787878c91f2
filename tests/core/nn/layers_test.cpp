// Layers against formulas in ordinary ops, and what they refuse.
#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera::nn {
namespace {

double difference(const Tensor& a, const Tensor& b) {
  NoGrad off;
  EXPECT_EQ(a.shape(), b.shape());
  return amax(tessera::abs(a - b)).item<double>();
}

TEST(Layers, LinearIsXTimesWeightTransposedPlusBias) {
  auto m = linear(3, 5);
  Tensor x = randn({2, 4, 3});
  EXPECT_LT(difference(m->forward(x), matmul(x, m->weight.transpose(0, 1)) + m->bias), 1e-6);
  expect_contains(error_of([] { linear(0, 3); }), "in=0");
}

TEST(Layers, EmbeddingPaddingRowIsZeroAndGetsNoGradient) {
  auto m = nn::embedding({.count = 5, .dim = 3, .padding_idx = 2});
  EXPECT_FLOAT_EQ(sum(tessera::abs(m->weight[2])).item<float>(), 0);
  sum(m->forward(from_values<int64_t>({0, 2, 2, 4}, {2, 2}))).backward();
  EXPECT_FLOAT_EQ(sum(m->weight.grad()[2]).item<float>(), 0);
  EXPECT_FLOAT_EQ(sum(m->weight.grad()[4]).item<float>(), 3);
  expect_contains(error_of([] { nn::embedding({.count = 5, .dim = 3, .padding_idx = 5}); }),
                  "padding_idx=5");
}

TEST(Layers, NormsNormaliseTheLastDim) {
  Tensor x = randn({4, 8}) * 3.0 + 1.0;
  auto ln = nn::layer_norm({.dim = 8, .eps = 1e-5, .bias = false});
  EXPECT_FALSE(ln->bias.defined());
  Tensor centred = x - mean(x, {-1}, true);
  Tensor want = centred / tessera::sqrt(mean(square(centred), {-1}, true) + 1e-5);
  EXPECT_LT(difference(ln->forward(x), want), 1e-5);
  auto rms = nn::rms_norm(8);
  EXPECT_LT(difference(rms->forward(x), x / tessera::sqrt(mean(square(x), {-1}, true) + 1e-5)),
            1e-5);
}

TEST(Layers, DropoutWorksWhileTrainingOnly) {
  manual_seed(3);
  auto m = nn::dropout(0.25);
  Tensor x = ones({200, 100}), y = m->forward(x);
  double kept = mean(ne(y, 0.0).to(kF32)).item<double>();
  EXPECT_NEAR(kept, 0.75, 0.02);
  EXPECT_NEAR(amax(y).item<double>(), 1 / 0.75, 1e-6);
  EXPECT_GT(difference(y, m->forward(x)), 0);  // a mask per call
  m->eval();
  EXPECT_TRUE(m->forward(x).is_same(x));
  expect_contains(error_of([] { nn::dropout(1.5); }), "p=1.5");
}

TEST(Layers, DropoutIsTheSameFromTheSameSeed) {
  auto m = nn::dropout(0.5);
  Tensor x = ones({50});
  manual_seed(8);
  Tensor a = m->forward(x);
  manual_seed(8);
  EXPECT_EQ(difference(a, m->forward(x)), 0);
}

TEST(Layers, FlattenAndActivations) {
  EXPECT_EQ(nn::flatten()->forward(ones({2, 3, 4})).shape(), Shape({2, 12}));
  Tensor x = randn({7});
  EXPECT_EQ(difference(nn::relu()->forward(x), maximum(x, 0.0)), 0);
  EXPECT_EQ(nn::identity()->forward(x).impl(), x.impl());
}

// The definition: softmax(q k^T / sqrt W) v per head.
Tensor attention_by_hand(MultiheadAttention& m, const Tensor& q_in, const Tensor& kv_in,
                         const Tensor& allowed) {
  Tensor q = split_heads(m.q_proj->forward(q_in), m.options.heads);
  Tensor k = split_heads(m.k_proj->forward(kv_in), m.options.heads);
  Tensor v = split_heads(m.v_proj->forward(kv_in), m.options.heads);
  Tensor scores = matmul(q, k.transpose(-2, -1)) / std::sqrt(double(q.size(-1)));
  if (allowed.defined()) scores = where(allowed, scores, scalar_tensor(-1e30, kF64));
  return m.out_proj->forward(merge_heads(matmul(softmax(scores), v)));
}

TEST(Attention, EqualsItsDefinition) {
  auto m = multihead_attention({.dim = 8, .heads = 2});
  m->to(kF64);
  Tensor x = randn({2, 5, 8}, {.dtype = kF64}), memory = randn({2, 7, 8}, {.dtype = kF64});
  EXPECT_LT(difference(m->forward(x), attention_by_hand(*m, x, x, {})), 1e-12);
  EXPECT_LT(difference(m->forward(x, {.causal = true}),
                       attention_by_hand(*m, x, x, ne(tril(ones({5, 5})), 0.0))),
            1e-12);
  EXPECT_LT(difference(m->forward(x, memory, memory), attention_by_hand(*m, x, memory, {})), 1e-12);
  Tensor real = lt(arange(0, 7), from_values<int64_t>({4, 7}, {2, 1}));  // [B, Tk]
  EXPECT_LT(difference(m->forward(x, memory, memory, {.key_mask = real}),
                       attention_by_hand(*m, x, memory, reshape(real, {2, 1, 1, 7}))),
            1e-12);
  Tensor some = ne(tril(ones({5, 7})), 0.0);
  EXPECT_LT(
      difference(m->forward(x, memory, memory, {.mask = some, .key_mask = real}),
                 attention_by_hand(*m, x, memory, logical_and(some, reshape(real, {2, 1, 1, 7})))),
      1e-12);
}

TEST(Attention, Refuses) {
  expect_contains(error_of([] { multihead_attention({.dim = 6, .heads = 4}); }), "dim=6");
  auto m = multihead_attention({.dim = 4, .heads = 2});
  Tensor x = ones({1, 3, 4});
  expect_contains(error_of([&] { m->forward(x, x, ones({3, 4})); }), "[B, T, D]");
  expect_contains(error_of([&] { m->forward(x, {.key_mask = ones({1, 3})}); }), "bool [B, Tk]");
  Tensor keys = ne(ones({1, 3}), 0.0);
  expect_contains(error_of([&] {
                    m->forward(x, {.mask = zeros({3, 3}), .key_mask = keys});
                  }),
                  "float mask");
}

TEST(Transformer, LayersFollowTheirFormulas) {
  for (bool pre : {false, true}) {
    auto m = transformer_encoder_layer(
        {.dim = 8, .heads = 2, .hidden = 12, .dropout = 0, .pre_norm = pre});
    m->to(kF64);
    Tensor x = randn({2, 3, 8}, {.dtype = kF64});
    auto part = [&](const char* name) -> Module& { return m->submodule(name); };
    auto feed = [&](const Tensor& h) { return part("linear2")(tessera::relu(part("linear1")(h))); };
    Tensor want;
    if (pre) {
      Tensor h = x + part("self_attn")(part("norm1")(x));
      want = h + feed(part("norm2")(h));
    } else {
      Tensor h = part("norm1")(x + part("self_attn")(x));
      want = part("norm2")(h + feed(h));
    }
    EXPECT_LT(difference(m->forward(x), want), 1e-12);
  }
}

TEST(Transformer, DecoderAttendsToMemoryAndBackwardsOnly) {
  auto m = transformer_decoder_layer({.dim = 8, .heads = 2, .dropout = 0, .pre_norm = true});
  Tensor x = randn({1, 4, 8}).requires_grad_(), memory = randn({1, 6, 8}).requires_grad_();
  Tensor y = m->forward(x, memory);
  EXPECT_EQ(y.shape(), Shape({1, 4, 8}));
  sum(y[0][1]).backward();
  EXPECT_EQ(amax(tessera::abs(slice(x.grad(), 1, 2, 4))).item<double>(), 0);
  EXPECT_GT(amax(tessera::abs(memory.grad())).item<double>(), 0);
}

}  // namespace
}  // namespace tessera::nn
