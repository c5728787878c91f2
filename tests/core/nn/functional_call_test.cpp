// Modules under function transforms: per-sample gradients of models equal those of a loop.
#include "core/nn/functional_call.h"

#include <gtest/gtest.h>

#include "core/autograd/autograd.h"
#include "core/autograd/transforms.h"
#include "core/nn/nn.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/random.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "examples/models/gpt.h"

namespace tessera {
namespace {

using List = std::vector<Tensor>;

Tensor double_values(const Shape& s, uint64_t key) { return sample_values(s, -1, 1, key); }

void expect_close(const Tensor& got, const Tensor& want, double tolerance,
                  const std::string& what) {
  ASSERT_EQ(describe(got), describe(want)) << what;
  EXPECT_LE(amax(abs(got.detach() - want.detach())).item<double>(), tolerance) << what;
}

// Per-sample gradients by vmap(grad) against backward() of each sample.
template <class Loss>
void expect_per_sample(nn::Module& model, const Tensor& x, const Tensor& y, Loss loss) {
  auto f = [&](const List& w, const Tensor& x, const Tensor& y) {
    return nn::functional_call(model, w, [&] { return loss(x, y); });
  };
  List got;
  {
    NoGrad off;
    got = vmap(grad(f), {.in_dims = {std::nullopt, 0, 0}})(model.parameters(), x, y);
  }
  std::vector<NamedTensor> params = model.named_parameters();
  for (int64_t b = 0; b < x.size(0); ++b) {
    model.zero_grad();
    loss(x[b], y[b]).backward();
    for (size_t i = 0; i < params.size(); ++i)
      expect_close(got[i][b], params[i].tensor.grad(), 1e-12, params[i].name);
  }
}

TEST(FunctionalCall, PerSampleGradientsOfAnMlp) {
  auto model =
      nn::sequential(nn::linear(5, 8), nn::gelu(), nn::layer_norm({.dim = 8}), nn::linear(8, 3));
  model->to(kF64);
  expect_per_sample(*model, double_values({6, 5}, 1), sample_integers({6}, 0, 3, 2),
                    [&](const Tensor& x, const Tensor& y) {
                      return cross_entropy(unsqueeze((*model)(x), 0), unsqueeze(y, 0));
                    });
}

TEST(FunctionalCall, PerSampleGradientsOfAConvolutionalNet) {
  auto model = nn::sequential(nn::conv2d({.in = 2, .out = 4, .kernel = 3}), nn::relu(),
                              nn::conv2d({.in = 4, .out = 3, .kernel = 2, .stride = 2}));
  model->to(kF64);
  expect_per_sample(*model, double_values({4, 2, 7, 7}, 1), double_values({4}, 2),
                    [&](const Tensor& x, const Tensor& y) {
                      return mean(square((*model)(unsqueeze(x, 0)) - y));
                    });
}

TEST(FunctionalCall, PerSampleGradientsOfAGptWithTiedWeights) {
  models::Gpt model({.vocab = 11, .context = 6, .layers = 2, .heads = 2, .dim = 8});
  model.to(kF64);
  expect_per_sample(model, sample_integers({3, 6}, 0, 11, 1), sample_integers({3, 6}, 0, 11, 2),
                    [&](const Tensor& ids, const Tensor& targets) {
                      return cross_entropy(model(unsqueeze(ids, 0)), unsqueeze(targets, 0),
                                           {.dim = -1});
                    });
}

TEST(FunctionalCall, ParametersByNameAndBack) {
  auto model = nn::linear({.in = 2, .out = 2, .bias = true});
  Tensor w = model->slot("weight"), x = ones({1, 2});
  std::vector<NamedTensor> zero{{"weight", zeros({2, 2})}};
  expect_close(nn::functional_call(*model, zero, x), unsqueeze(model->slot("bias"), 0), 0, "bias");
  EXPECT_TRUE(model->slot("weight").is_same(w));
  auto fails = [&](const List& params) {
    try {
      nn::functional_call(*model, params, x);
      return std::string();
    } catch (const UserError& e) {
      return std::string(e.what());
    }
  };
  EXPECT_NE(fails({w}).find("1 tensors for 2 parameters"), std::string::npos);
  EXPECT_NE(fails({w, ones({3})}).find("bias is f32[2] cpu, given f32[3]"), std::string::npos);
  EXPECT_TRUE(model->slot("weight").is_same(w));
}

}  // namespace
}  // namespace tessera
