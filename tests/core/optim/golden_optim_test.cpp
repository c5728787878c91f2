// Optimizers, clipping and schedules against PyTorch: the cases of tests/golden/ops.json.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/autograd/autograd.h"
#include "core/io/safetensors.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"

namespace tessera::optim {
namespace {

using nlohmann::json;

std::string golden(const std::string& file) {
  const char* source = std::getenv("TESSERA_SOURCE");
  return std::string(source ? source : ".") + "/tests/golden/" + file;
}

const io::SafetensorsFile& tensors() {
  static io::SafetensorsFile file = io::SafetensorsFile::open(golden("ops.safetensors"));
  return file;
}

std::vector<json> cases_of(const std::string& op) {
  static json all = json::parse(std::ifstream(golden("ops.json")));
  std::vector<json> out;
  for (const json& c : all["cases"])
    if (c["op"] == op) out.push_back(c);
  EXPECT_FALSE(out.empty()) << op;
  return out;
}

void expect_near(const Tensor& got, const Tensor& want, const std::string& what) {
  NoGrad off;
  ASSERT_EQ(got.shape(), want.shape()) << what;
  EXPECT_LE(amax(abs(got - want)).item<double>(), 1e-12 * (1 + amax(abs(want)).item<double>()))
      << what;
}

// Parameters after each step, fed with the stored gradients times `sign`.
template <class MakeOptimizer>
void follow(const json& c, double sign, MakeOptimizer make) {
  std::string name = c["name"];
  Tensor p = tensors().load(name + "/in/p").requires_grad_(),
         grads = tensors().load(name + "/in/grads");
  auto opt = make(std::vector<Tensor>{p});
  Tensor want = tensors().load(name + "/out/out");
  for (int64_t step = 0; step < grads.size(0); ++step) {
    p.set_grad(grads[step].clone());
    opt.step(sign == 1 ? Tensor() : scalar_tensor(sign, kF64));
    expect_near(p.detach(), want[step], name + " step " + std::to_string(step));
  }
}

TEST(GoldenOptim, Sgd) {
  for (const json& c : cases_of("SGD")) {
    const json& a = c["attributes"];
    SGDOptions o{.lr = a["lr"],
                 .momentum = a.value("momentum", 0.0),
                 .dampening = a.value("dampening", 0.0),
                 .weight_decay = a.value("weight_decay", 0.0),
                 .nesterov = a.value("nesterov", false)};
    follow(c, a.value("maximize", false) ? -1 : 1, [&](auto params) { return SGD(params, o); });
  }
}

TEST(GoldenOptim, AdamAndAdamW) {
  for (const char* op : {"Adam", "AdamW"})
    for (const json& c : cases_of(op)) {
      const json& a = c["attributes"];
      if (a.contains("amsgrad")) continue;  // not offered
      AdamWOptions o{.lr = a["lr"], .eps = a.value("eps", 1e-8)};
      if (a.contains("betas")) o.betas = {a["betas"][0], a["betas"][1]};
      o.weight_decay = a.value("weight_decay", std::string(op) == "Adam" ? 0.0 : 0.01);
      if (std::string(op) == "Adam")
        follow(c, 1, [&](auto params) {
          return Adam(params, {o.lr, o.betas, o.eps, o.weight_decay});
        });
      else
        follow(c, 1, [&](auto params) { return AdamW(params, o); });
    }
}

TEST(GoldenOptim, RmspropAdagradAndLion) {
  for (const json& c : cases_of("RMSprop")) {
    const json& a = c["attributes"];
    RMSpropOptions o{.lr = a["lr"],
                     .alpha = a.value("alpha", 0.99),
                     .eps = a.value("eps", 1e-8),
                     .weight_decay = a.value("weight_decay", 0.0),
                     .momentum = a.value("momentum", 0.0),
                     .centered = a.value("centered", false)};
    follow(c, 1, [&](auto params) { return RMSprop(params, o); });
  }
  for (const json& c : cases_of("Adagrad")) {
    const json& a = c["attributes"];
    AdagradOptions o{.lr = a["lr"],
                     .lr_decay = a.value("lr_decay", 0.0),
                     .weight_decay = a.value("weight_decay", 0.0),
                     .eps = a.value("eps", 1e-10)};
    follow(c, 1, [&](auto params) { return Adagrad(params, o); });
  }
  for (const json& c : cases_of("Lion")) {
    const json& a = c["attributes"];
    LionOptions o{.lr = a["lr"], .weight_decay = a.value("weight_decay", 0.0)};
    if (a.contains("betas")) o.betas = {a["betas"][0], a["betas"][1]};
    follow(c, 1, [&](auto params) { return Lion(params, o); });
  }
}

TEST(GoldenOptim, ClipGradNorm) {
  for (const json& c : cases_of("clip_grad_norm")) {
    std::string name = c["name"];
    double type = name.ends_with("infinity_norm") ? std::numeric_limits<double>::infinity() : 2;
    double max_norm = c["attributes"]["max_norm"];
    std::vector<Tensor> params;
    for (const char* key : {"a", "b", "c"}) {
      Tensor g = tensors().load(name + "/in/" + key);
      params.push_back(g.clone().requires_grad_());
      params.back().set_grad(g);
    }
    Clip clip = clip_grad_norm(params, max_norm, {.norm_type = type});
    expect_near(clip.norm, tensors().load(name + "/out/norm"), name);
    for (int i = 0; i < 3; ++i)
      expect_near(params[size_t(i)].grad() * clip.scale, tensors().load(name + "/out/" + "abc"[i]),
                  name + " scale");
    expect_near(clip_grad_norm_(params, max_norm, {.norm_type = type}),
                tensors().load(name + "/out/norm"), name);
    for (int i = 0; i < 3; ++i)
      expect_near(params[size_t(i)].grad(), tensors().load(name + "/out/" + "abc"[i]),
                  name + " in place");
  }
}

// `until`: the steps during which PyTorch's schedule and ours are the same function; ours then
// stays where it is.
void follow(const std::string& name, const Schedule& ours, int64_t until = 24) {
  Tensor want = tensors().load("schedule/" + name + "/out/out");
  for (int64_t step = 0; step < until; ++step)
    EXPECT_NEAR(ours(step), want[step].item<double>(), 1e-15) << name << " step " << step;
}

TEST(GoldenOptim, Schedules) {
  double lr = 0.1;
  follow("ConstantLR/default", sequence({constant(lr / 3), constant(lr)}, {5}));
  follow("LinearLR/warmup", linear(0.1 * lr, lr, 8));
  follow("LinearLR/decay", linear(lr, 0, 20));
  follow("CosineAnnealingLR/plain", cosine(lr, 0, 20), 21);  // PyTorch's rises again
  follow("CosineAnnealingLR/eta_min", cosine(lr, 0.01, 23));
  follow("StepLR/plain", step_decay(lr, 7, 0.5));
  follow("SequentialLR/warmup_cosine", sequence({linear(0.1 * lr, lr, 5), cosine(lr, 0, 18)}, {5}));
}

TEST(GoldenOptim, WarmupCosineIsNanoGpts) {
  Schedule s = schedule("cosine", {.lr = 1e-3, .min_lr = 1e-4, .steps = 100, .warmup = 10});
  for (int64_t step : {0, 1, 9, 10, 11, 50, 99, 100, 150}) {
    Tensor want = tensors().load("schedule/warmup_cosine/out/step_" + std::to_string(step));
    EXPECT_EQ(float(s(step)), want.item<float>()) << step;  // stored in fp32
  }
}

}  // namespace
}  // namespace tessera::optim
