// Layers against formulas in ordinary ops, and what they refuse.
#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/indexing.h"
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
  EXPECT_LT(difference((*m)(x), matmul(x, m->weight.transpose(0, 1)) + m->bias), 1e-6);
  expect_contains(error_of([] { linear(0, 3); }), "in=0");
}

TEST(Layers, EmbeddingPaddingRowIsZeroAndGetsNoGradient) {
  auto m = nn::embedding({.count = 5, .dim = 3, .padding_idx = 2});
  EXPECT_FLOAT_EQ(sum(tessera::abs(m->weight[2])).item<float>(), 0);
  sum((*m)(from_values<int64_t>({0, 2, 2, 4}, {2, 2}))).backward();
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
  EXPECT_LT(difference((*ln)(x), want), 1e-5);
  auto rms = nn::rms_norm(8);
  EXPECT_LT(difference((*rms)(x), x / tessera::sqrt(mean(square(x), {-1}, true) + 1e-5)), 1e-5);
}

TEST(Layers, DropoutWorksWhileTrainingOnly) {
  manual_seed(3);
  auto m = nn::dropout(0.25);
  Tensor x = ones({200, 100}), y = (*m)(x);
  double kept = mean(ne(y, 0.0).to(kF32)).item<double>();
  EXPECT_NEAR(kept, 0.75, 0.02);
  EXPECT_NEAR(amax(y).item<double>(), 1 / 0.75, 1e-6);
  EXPECT_GT(difference(y, (*m)(x)), 0);  // a mask per call
  m->eval();
  EXPECT_TRUE((*m)(x).is_same(x));
  expect_contains(error_of([] { nn::dropout(1.5); }), "p=1.5");
}

TEST(Layers, DropoutIsTheSameFromTheSameSeed) {
  auto m = nn::dropout(0.5);
  Tensor x = ones({50});
  manual_seed(8);
  Tensor a = (*m)(x);
  manual_seed(8);
  EXPECT_EQ(difference(a, (*m)(x)), 0);
}

TEST(Layers, FlattenAndActivations) {
  EXPECT_EQ((*nn::flatten())(ones({2, 3, 4})).shape(), Shape({2, 12}));
  Tensor x = randn({7});
  EXPECT_EQ(difference((*nn::relu())(x), maximum(x, 0.0)), 0);
  EXPECT_EQ((*nn::identity())(x).impl(), x.impl());
}

// The definition: softmax(q k^T / sqrt W) v per head.
Tensor attention_by_hand(MultiheadAttention& m, const Tensor& q_in, const Tensor& kv_in,
                         const Tensor& allowed) {
  Tensor q = split_heads((*m.q_proj)(q_in), m.options.heads);
  Tensor k = split_heads((*m.k_proj)(kv_in), m.options.heads);
  Tensor v = split_heads((*m.v_proj)(kv_in), m.options.heads);
  Tensor scores = matmul(q, k.transpose(-2, -1)) / std::sqrt(double(q.size(-1)));
  if (allowed.defined()) scores = where(allowed, scores, scalar_tensor(-1e30, kF64));
  return (*m.out_proj)(merge_heads(matmul(softmax(scores), v)));
}

TEST(Attention, EqualsItsDefinition) {
  auto m = multihead_attention({.dim = 8, .heads = 2});
  m->to(kF64);
  Tensor x = randn({2, 5, 8}, {.dtype = kF64}), memory = randn({2, 7, 8}, {.dtype = kF64});
  EXPECT_LT(difference((*m)(x), attention_by_hand(*m, x, x, {})), 1e-12);
  EXPECT_LT(difference((*m)(x, {.causal = true}),
                       attention_by_hand(*m, x, x, ne(tril(ones({5, 5})), 0.0))),
            1e-12);
  EXPECT_LT(difference((*m)(x, memory, memory), attention_by_hand(*m, x, memory, {})), 1e-12);
  Tensor real = lt(arange(0, 7), from_values<int64_t>({4, 7}, {2, 1}));  // [B, Tk]
  EXPECT_LT(difference((*m)(x, memory, memory, {.key_mask = real}),
                       attention_by_hand(*m, x, memory, reshape(real, {2, 1, 1, 7}))),
            1e-12);
  Tensor some = ne(tril(ones({5, 7})), 0.0);
  EXPECT_LT(
      difference((*m)(x, memory, memory, {.mask = some, .key_mask = real}),
                 attention_by_hand(*m, x, memory, logical_and(some, reshape(real, {2, 1, 1, 7})))),
      1e-12);
}

TEST(Attention, Refuses) {
  expect_contains(error_of([] { multihead_attention({.dim = 6, .heads = 4}); }), "dim=6");
  auto m = multihead_attention({.dim = 4, .heads = 2});
  Tensor x = ones({1, 3, 4});
  expect_contains(error_of([&] { (*m)(x, x, ones({3, 4})); }), "[B, T, D]");
  expect_contains(error_of([&] { (*m)(x, {.key_mask = ones({1, 3})}); }), "bool [B, Tk]");
  Tensor keys = ne(ones({1, 3}), 0.0);
  expect_contains(error_of([&] {
                    (*m)(x, {.mask = zeros({3, 3}), .key_mask = keys});
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
    EXPECT_LT(difference((*m)(x), want), 1e-12);
  }
}

TEST(Transformer, DecoderAttendsToMemoryAndBackwardsOnly) {
  auto m = transformer_decoder_layer({.dim = 8, .heads = 2, .dropout = 0, .pre_norm = true});
  Tensor x = randn({1, 4, 8}).requires_grad_(), memory = randn({1, 6, 8}).requires_grad_();
  Tensor y = (*m)(x, memory);
  EXPECT_EQ(y.shape(), Shape({1, 4, 8}));
  sum(y[0][1]).backward();
  EXPECT_EQ(amax(tessera::abs(slice(x.grad(), 1, 2, 4))).item<double>(), 0);
  EXPECT_GT(amax(tessera::abs(memory.grad())).item<double>(), 0);
}

TEST(Transformer, StacksOfLayersAreThoseLayersInTurn) {
  const TransformerLayerOptions options{.dim = 8, .heads = 2, .dropout = 0, .pre_norm = true};
  Tensor x = randn({2, 4, 8}), memory = randn({2, 3, 8});
  auto encoder = transformer_encoder(options, 2, true);
  auto layer = [](Module & m, const char* name) -> auto& { return m.submodule(name); };
  Tensor want = x;
  for (const char* name : {"layers.0", "layers.1"}) want = layer(*encoder, name)(want);
  want = layer(*encoder, "norm")(want);
  EXPECT_EQ(difference((*encoder)(x), want), 0);
  EXPECT_GT(difference((*encoder)(x, {.causal = true}), want), 1e-3);

  auto decoder = transformer_decoder(options, 2);
  want = x;
  for (const char* name : {"layers.0", "layers.1"})
    want = dynamic_cast<TransformerDecoderLayer&>(layer(*decoder, name))(want, memory);
  EXPECT_EQ(difference((*decoder)(x, memory), want), 0);
  expect_contains(error_of([&] { transformer_encoder(options, 0); }), "0 layers");
}

TEST(Layers, ArgumentsByPosition) {
  EXPECT_FALSE(Linear(2, 3, false).bias.defined());
  EXPECT_EQ(linear(2, 3, false)->describe(),
            linear({.in = 2, .out = 3, .bias = false})->describe());
  EXPECT_EQ(linear({2, 3, false})->describe(),
            linear({.in = 2, .out = 3, .bias = false})->describe());
  EXPECT_EQ(Embedding(5, 3).weight.shape(), (Shape{5, 3}));
  EXPECT_EQ(layer_norm(4)->describe(), LayerNorm(4).describe());
  EXPECT_EQ(RMSNorm(4).weight.shape(), Shape{4});
  EXPECT_EQ(conv2d(3, 6, 5, 2, 1)->describe(),
            conv2d({.in = 3, .out = 6, .kernel = 5, .stride = 2, .padding = 1})->describe());
  EXPECT_EQ(Conv1d(3, 6, 5).weight.shape(), (Shape{6, 3, 5}));
  EXPECT_EQ(BatchNorm2d(7).describe(), batch_norm2d({.channels = 7})->describe());
  EXPECT_EQ(GroupNorm(2, 6).describe(), group_norm({.groups = 2, .channels = 6})->describe());
  EXPECT_EQ(MultiheadAttention(8, 2).options.heads, 2);
}

TEST(Layers, ActivationsAreTheFunctionsOfTheirNames) {
  const Tensor x = randn({2, 3, 4});
  auto same = [&](Module& m, const Tensor& want, const std::string& name) {
    EXPECT_EQ(difference(m(x), want), 0) << name;
    EXPECT_EQ(m.type_name(), name);
  };
  same(*mish(), tessera::mish(x), "Mish");
  same(*leaky_relu(0.2), tessera::leaky_relu(x, 0.2), "LeakyReLU");
  same(*elu(0.5), tessera::elu(x, 0.5), "ELU");
  same(*softmax(1), tessera::softmax(x, 1), "Softmax");
  same(*log_softmax(), tessera::log_softmax(x, -1), "LogSoftmax");
  ReLU relu;
  GELU gelu;
  SiLU silu;
  Tanh tanh;
  Sigmoid sigmoid;
  Identity identity;
  same(relu, tessera::relu(x), "ReLU");
  same(gelu, tessera::gelu(x), "GELU");
  same(silu, tessera::silu(x), "SiLU");
  same(tanh, tessera::tanh(x), "Tanh");
  same(sigmoid, tessera::sigmoid(x), "Sigmoid");
  same(identity, x, "Identity");
  auto one = prelu(), each = prelu(3, 0.5);
  EXPECT_EQ(difference((*one)(x), tessera::leaky_relu(x, 0.25)), 0);
  EXPECT_EQ(difference((*each)(x), tessera::leaky_relu(x, 0.5)), 0);
  EXPECT_EQ(each->named_parameters()[0].tensor.shape(), Shape{3});
  sum((*each)(x)).backward();
  EXPECT_TRUE(allclose(each->weight.grad(), sum(minimum(x, 0), {0, 2})));
}

TEST(Layers, NormsDropoutAndSizesOfImages) {
  const Tensor x = randn({2, 3, 4, 4}) * 3.0 + 1.0;
  const Tensor y = (*instance_norm2d({.channels = 3}))(x);
  EXPECT_LT(amax(tessera::abs(mean(y, {2, 3}))).item<double>(), 1e-5);
  EXPECT_LT(amax(tessera::abs(var(y, {2, 3}, 0) - 1.0)).item<double>(), 1e-3);
  EXPECT_TRUE(instance_norm1d({.channels = 3})->parameters().empty());
  EXPECT_EQ(instance_norm3d({.channels = 3, .affine = true})->parameters().size(), 2u);
  EXPECT_EQ((*upsample({.scale_factor = {2}}))(x).shape(), (Shape{2, 3, 8, 8}));
  auto drop = dropout2d(0.5);
  manual_seed(1);
  const Tensor dropped = (*drop)(ones({4, 16, 2, 2}));
  EXPECT_EQ(
      difference(dropped, dropped.index({Ellipsis, Slice(0, 1), Slice(0, 1)}) + zeros({2, 2})), 0);
  EXPECT_GT(count_nonzero(dropped).item<int64_t>(), 0);
  EXPECT_LT(count_nonzero(dropped).item<int64_t>(), 256);
  drop->eval();
  EXPECT_EQ(difference((*drop)(x), x), 0);
}

TEST(Losses, ObjectsKeepTheirOptions) {
  const Tensor logits = randn({4, 3}), classes = tensor({0, 2, 1, 0}), x = rand({4}), y = rand({4});
  auto same = [](const Tensor& got, const Tensor& want) { EXPECT_EQ(difference(got, want), 0); };
  same(CrossEntropyLoss()(logits, classes), tessera::cross_entropy(logits, classes));
  same(CrossEntropyLoss({.label_smoothing = 0.1})(logits, classes),
       tessera::cross_entropy(logits, classes, {.label_smoothing = 0.1}));
  same(NLLLoss()(tessera::log_softmax(logits, 1), classes),
       tessera::nll_loss(tessera::log_softmax(logits, 1), classes));
  same(MSELoss()(x, y), tessera::mse_loss(x, y));
  same(L1Loss(Reduction::kSum)(x, y), tessera::l1_loss(x, y, Reduction::kSum));
  same(BCELoss()(x, y), tessera::binary_cross_entropy(x, y));
  same(BCEWithLogitsLoss(tensor(2.))(x, y),
       tessera::binary_cross_entropy_with_logits(x, y, {}, tensor(2.)));
}

}  // namespace
}  // namespace tessera::nn
