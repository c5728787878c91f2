// The GPT as a model: names and counts, initial values, causality, dropout, order of fused rows,
// sampling, options.
#include "examples/models/gpt.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "examples/models/mlp.h"
#include "tests/support/temp_folder.h"

namespace tessera::models {
namespace {

GptOptions tiny() { return {.vocab = 11, .context = 8, .layers = 2, .heads = 2, .dim = 16}; }
Tensor random_ids(int64_t B, int64_t T, int64_t V) { return randint(0, V, {B, T}); }
double difference(const Tensor& a, const Tensor& b) {
  NoGrad off;
  return amax(abs(a - b)).item<double>();
}

TEST(Gpt, HasThePublishedNumberOfParameters) {
  nn::OnDevice meta(kMeta);
  EXPECT_EQ(gpt(gpt2())->num_parameters(), 124'439'808);
  GptOptions plain = gpt_nano();
  plain.tied = false;
  EXPECT_EQ(gpt(plain)->num_parameters() - gpt(gpt_nano())->num_parameters(), 65 * 128);
}

TEST(Gpt, NamesAreGpt2s) {
  auto m = gpt({.layers = 1, .bias = true});
  std::vector<std::string> names;
  for (auto& p : m->named_parameters()) names.push_back(p.name);
  EXPECT_EQ(names, (std::vector<std::string>{
                       "wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.0.ln_1.bias",
                       "h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias", "h.0.attn.c_proj.weight",
                       "h.0.attn.c_proj.bias", "h.0.ln_2.weight", "h.0.ln_2.bias",
                       "h.0.mlp.c_fc.weight", "h.0.mlp.c_fc.bias", "h.0.mlp.c_proj.weight",
                       "h.0.mlp.c_proj.bias", "ln_f.weight", "ln_f.bias"}));
  EXPECT_EQ(m->submodule("h.0.attn.c_attn").path(), "h.0.attn.c_attn");
}

TEST(Gpt, InitialValues) {
  GptOptions o = gpt_nano();
  o.bias = true;
  auto m = gpt(o);
  NoGrad off;
  EXPECT_NEAR(stddev(m->slot("wte.weight")).item<double>(), 0.02, 1e-3);
  EXPECT_NEAR(stddev(m->slot("h.1.mlp.c_fc.weight")).item<double>(), 0.02, 1e-3);
  EXPECT_NEAR(stddev(m->slot("h.1.mlp.c_proj.weight")).item<double>(), 0.02 / std::sqrt(8.0), 5e-4);
  EXPECT_NEAR(stddev(m->slot("h.2.attn.c_proj.weight")).item<double>(), 0.02 / std::sqrt(8.0),
              5e-4);
  EXPECT_EQ(amin(m->slot("ln_f.weight")).item<double>(), 1);
  EXPECT_EQ(amax(abs(m->slot("h.0.attn.c_attn.bias"))).item<double>(), 0);
  // An untrained model knows nothing: the loss is log V.
  EXPECT_NEAR(m->loss(random_ids(4, 32, 65), random_ids(4, 32, 65)).item<double>(), std::log(65.0),
              0.1);
  // One seed, one model, whatever was drawn before.
  auto other = gpt(o);
  m->init(3), other->init(3);
  EXPECT_EQ(difference(m->slot("h.3.attn.c_attn.weight"), other->slot("h.3.attn.c_attn.weight")),
            0);
}

TEST(Gpt, LooksBackOnly) {
  auto m = gpt(tiny());
  NoGrad off;
  Tensor a = random_ids(1, 8, 11), b = a.clone();
  b.data<int64_t>()[5] = (b.data<int64_t>()[5] + 1) % 11;
  Tensor la = (*m)(a), lb = (*m)(b);
  EXPECT_EQ(difference(slice(la, 1, 0, 5), slice(lb, 1, 0, 5)), 0);
  EXPECT_GT(difference(slice(la, 1, 5, 8), slice(lb, 1, 5, 8)), 0);
  EXPECT_LT(difference(slice(la, 1, 0, 3), (*m)(slice(a, 1, 0, 3))), 1e-6);
}

TEST(Gpt, DropoutWhileTrainingOnly) {
  GptOptions o = tiny();
  o.dropout = 0.3;
  auto m = gpt(o);
  Tensor ids = random_ids(2, 8, 11);
  NoGrad off;
  EXPECT_GT(difference((*m)(ids), (*m)(ids)), 0);
  m->eval();
  EXPECT_EQ(difference((*m)(ids), (*m)(ids)), 0);
}

TEST(Gpt, RowOrdersAreInverse) {
  // Heads 2, width 1: rows named q0 q1 k0 k1 v0 v1 become q0 k0 v0 q1 k1 v1.
  std::vector<NamedTensor> state{
      {"h.0.attn.c_attn.bias", from_values<float>({0, 1, 10, 11, 20, 21}, {6})},
      {"h.0.attn.c_proj.bias", from_values<float>({5, 6}, {2})}};
  auto ours = from_gpt2_order(state, 2);
  EXPECT_EQ(difference(ours[0].tensor, from_values<float>({0, 10, 20, 1, 11, 21}, {6})), 0);
  EXPECT_TRUE(ours[1].tensor.is_same(state[1].tensor));
  EXPECT_EQ(difference(to_gpt2_order(ours, 2)[0].tensor, state[0].tensor), 0);
}

TEST(Gpt, Generates) {
  auto m = gpt(tiny());
  auto a = generate(*m, {1, 2, 3}, {.tokens = 20, .key = 5}),
       b = generate(*m, {1, 2, 3}, {.tokens = 20, .key = 5});
  EXPECT_EQ(a, b);
  EXPECT_EQ(a.size(), 23u);
  EXPECT_NE(a, generate(*m, {1, 2, 3}, {.tokens = 20, .key = 6}));
  for (int64_t id : a) EXPECT_TRUE(id >= 0 && id < 11);
  EXPECT_EQ(generate(*m, {1}, {.tokens = 9, .temperature = 0}),
            generate(*m, {1}, {.tokens = 9, .temperature = 2, .top_k = 1, .key = 9}));
  EXPECT_TRUE(m->training());
  expect_contains(error_of([&] { generate(*m, {}); }), "prompt is empty");
  expect_contains(error_of([&] { generate(*m, {99}); }), "99");
}

TEST(Gpt, Refuses) {
  expect_contains(error_of([] { gpt({.heads = 3}); }), "heads=3");
  auto m = gpt(tiny());
  expect_contains(error_of([&] { (*m)(random_ids(1, 9, 11)); }), "context 8");
}

TEST(Options, AnyFieldByName) {
  GptOptions o;
  set_option(o, "dim", "96"), set_option(o, "dropout", "0.25"), set_option(o, "bias", "true");
  EXPECT_EQ(o.dim, 96);
  EXPECT_EQ(o.dropout, 0.25);
  EXPECT_TRUE(o.bias);
  expect_contains(error_of([&] { set_option(o, "dims", "1"); }), "it has vocab, context");
  expect_contains(error_of([&] { set_option(o, "dim", "9x"); }), "\"9x\"");
  expect_contains(error_of([&] { set_option(o, "tied", "maybe"); }), "true or false");
}

TEST(Mlp, ClassifiesAndRegresses) {
  auto m = mlp({.in = 6, .hidden = 8, .out = 3});
  Tensor x = randn({4, 2, 3});
  EXPECT_EQ((*m)(x).shape(), Shape({4, 3}));
  EXPECT_NEAR(m->loss(x, randint(0, 3, {4})).item<double>(), std::log(3.0), 0.5);
  m->loss(x, zeros({4, 3})).backward();
  EXPECT_TRUE(m->slot("layers.0.weight").grad().defined());
  expect_contains(error_of([&] { (*m)(randn({4, 5})); }), "in=6");
}

TEST(Gpt, EachSizeIsPositive) {
  using models::GptOptions;
  for (int64_t GptOptions::*size : {&GptOptions::layers, &GptOptions::heads, &GptOptions::dim,
                                    &GptOptions::context, &GptOptions::vocab}) {
    GptOptions o = models::gpt_nano();
    o.*size = 0;
    expect_contains(error_of([&] { models::gpt(o); }), "gpt: layers=");
  }
}

}  // namespace
}  // namespace tessera::models
