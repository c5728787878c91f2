// Compares residual networks with PyTorch from the same weights: loss, logits, a norm and a random
// projection of every gradient and running statistic, in fp64. The file says how it was made
// (scripts/reference/make_golden_resnet.py).
#include "examples/models/resnet.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "compile/compile.h"
#include "core/autograd/autograd.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/update.h"
#include "core/optim/optim.h"

namespace tessera::models {
namespace {

using nlohmann::json;

const json& cases() {
  static const json* all = [] {
    const char* source = std::getenv("TESSERA_SOURCE");
    std::ifstream file(std::string(source ? source : ".") + "/tests/golden/resnet.json");
    return new json(json::parse(file)["cases"]);
  }();
  return *all;
}

std::shared_ptr<ResNet> model_of(const json& c) {
  const json& o = c["options"];
  nn::SkipInit skip;
  auto model = resnet({.depth = o["depth"],
                       .classes = o["classes"],
                       .width = o["width"],
                       .small_images = o["small_images"]});
  model->to(kF64);
  NoGrad off;
  uint64_t key = 100;
  for (const NamedTensor& p : model->named_parameters()) {
    const Shape& s = p.tensor.shape();
    double bound = s.size() > 1 ? std::sqrt(6 / (double(numel(s)) / double(s[0]))) : 0.2;
    bool scale = s.size() == 1 && p.name.ends_with("weight");
    assign_(p.tensor, sample_values(s, scale ? 0.5 : -bound, scale ? 1.5 : bound, key++));
  }
  for (const NamedTensor& b : model->named_buffers())
    if (b.name.ends_with("running_var"))
      nn::ones_(b.tensor);
    else
      nn::zeros_(b.tensor);
  return model;
}

void expect_digest(const std::string& name, const Tensor& t, uint64_t key, const json& want) {
  Tensor x = cast(t, kF64);
  double size = want[0].get<double>(), length = norm(x).item<double>(),
         dot = sum(x * sample_values(x.shape(), -1, 1, key)).item<double>();
  // Rounding errors grow through the layers, at most so much here, and a projection as the norm.
  EXPECT_NEAR(length, size, 1e-9 * (1 + size)) << name;
  EXPECT_NEAR(dot, want[1].get<double>(), 1e-9 * (1 + size)) << name;
}

void expect_digests(const std::vector<NamedTensor>& list, bool gradients, uint64_t key,
                    const json& want) {
  ASSERT_EQ(list.size(), want.size());
  for (const NamedTensor& t : list) {
    ASSERT_TRUE(want.contains(t.name)) << t.name;
    expect_digest(t.name, gradients ? t.tensor.grad() : t.tensor, key++, want[t.name]);
  }
}

TEST(ResNet, LossAndGradientsEqualPyTorch) {
  for (const json& c : cases()) {
    SCOPED_TRACE(c["name"].get<std::string>());
    auto model = model_of(c);
    Shape images;
    for (int64_t e : c["images"]) images.push_back(e);
    Tensor x = sample_values(images, -1, 1, 1),
           targets = sample_integers({images[0]}, 0, model->options.classes, 2);
    Tensor loss = model->loss(x, targets);
    EXPECT_NEAR(loss.item<double>(), c["loss"].get<double>(), 1e-10);
    loss.backward();
    expect_digests(model->named_parameters(), true, 5000, c["gradients"]);
    expect_digests(model->named_buffers(), false, 9000, c["buffers"]);
    model->eval();
    NoGrad off;
    Tensor logits = (*model)(x);
    double want = c["eval_loss"];
    EXPECT_NEAR(model->loss(x, targets).item<double>(), want, 1e-9 * (1 + want));
    EXPECT_EQ(logits.shape(), Shape({images[0], model->options.classes}));
  }
}

TEST(ResNet, HasAsManyParametersAsPublished) {
  nn::OnDevice meta(kMeta);
  EXPECT_EQ(resnet({.depth = 18})->num_parameters(), 11689512);
  EXPECT_EQ(resnet({.depth = 34})->num_parameters(), 21797672);
  EXPECT_EQ(resnet({.depth = 50})->num_parameters(), 25557032);
}

// A compiled training step follows the eager one: parameters and running statistics.
TEST(ResNet, CompiledStepEqualsEager) {
  auto eager = model_of(cases()[0]), compiled = model_of(cases()[0]);
  optim::SGD eager_opt(eager->named_parameters(), {.lr = 0.01, .momentum = 0.9}),
      compiled_opt(compiled->named_parameters(), {.lr = 0.01, .momentum = 0.9});
  auto step = [](ResNet& m, optim::Optimizer& opt, const Tensor& x, const Tensor& t) {
    m.zero_grad();
    Tensor loss = m.loss(x, t);
    loss.backward();
    opt.step();
    return loss.detach();
  };
  auto fast = compile([&](const std::vector<Tensor>& in) {
    return Tensors{step(*compiled, compiled_opt, in[0], in[1])};
  });
  for (int i = 0; i < 4; ++i) {
    Tensor x = sample_values({3, 3, 16, 16}, -1, 1, uint64_t(20 + i)),
           t = sample_integers({3}, 0, 10, uint64_t(40 + i));
    double want = step(*eager, eager_opt, x, t).item<double>();
    EXPECT_NEAR(fast(std::vector<Tensor>{x, t})[0].item<double>(), want, 1e-8 * (1 + want)) << i;
  }
  EXPECT_GT(fast.report().replays, 0) << fast.report().why_not;
  auto a = eager->named_buffers(), b = compiled->named_buffers();
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_LT(amax(abs(cast(a[i].tensor, kF64) - cast(b[i].tensor, kF64))).item<double>(), 1e-8)
        << a[i].name;
}

}  // namespace
}  // namespace tessera::models
