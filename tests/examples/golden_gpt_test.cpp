// Compares the GPT with PyTorch from the same weights: loss, logits, every gradient and ten AdamW
// steps, in fp64 and fp32. The files say how they were made (scripts/reference/make_golden_gpt.py).
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/autograd/autograd.h"
#include "core/io/safetensors.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "examples/models/gpt.h"

namespace tessera {
namespace {

using models::Gpt;
using nlohmann::json;

std::string golden(const std::string& file) {
  const char* source = std::getenv("TESSERA_SOURCE");
  return std::string(source ? source : ".") + "/tests/golden/" + file;
}

struct Golden {
  explicit Golden(const std::string& name) : file(io::SafetensorsFile::open(golden(name))) {
    json c = json::parse(file.metadata().at("config"));
    options = {.vocab = c["vocab"],
               .context = c["context"],
               .layers = c["layers"],
               .heads = c["heads"],
               .dim = c["dim"],
               .bias = c["bias"],
               .tanh_gelu = c["gelu"] == "tanh",
               .tied = c["tied"]};
    optimizer = json::parse(file.metadata().at("optimizer"));
    vanishing = json::parse(file.metadata().at("vanishing"));
  }
  // The tensors "<prefix>/<parameter>".
  std::vector<NamedTensor> under(const std::string& prefix) const {
    std::vector<NamedTensor> out;
    for (const io::TensorInfo& t : file.tensors())
      if (t.name.starts_with(prefix + "/"))
        out.push_back({t.name.substr(prefix.size() + 1), file.load(t.name)});
    return out;
  }
  io::SafetensorsFile file;
  models::GptOptions options;
  json optimizer, vanishing;
};

double largest(const Tensor& x) { return amax(abs(x.to(kF64))).item<double>(); }
double length(const Tensor& x) { return norm(x.to(kF64)).item<double>(); }

class Comparison {
 public:
  Comparison(const Golden& g, double bound) : golden_(g), bound_(bound) {}

  // Largest difference over the tensor's largest value.
  void by_max(const std::string& name, const Tensor& got, const Tensor& want) const {
    compare(name, got, want, largest);
  }
  // Norm of the difference over the tensor's norm.
  void by_norm(const std::string& name, const Tensor& got, const Tensor& want) const {
    compare(name, got, want, length);
  }

 private:
  void compare(const std::string& name, const Tensor& got, const Tensor& want,
               double (*size)(const Tensor&)) const {
    ASSERT_EQ(got.shape(), want.shape()) << name;
    for (auto [begin, end] : kept_rows(name, want)) {
      Tensor a = slice(got.detach().to(kF64), 0, begin, end),
             b = slice(want.to(kF64), 0, begin, end);
      EXPECT_LE(size(a - b), bound_ * size(b)) << name << " rows " << begin << " to " << end;
    }
  }
  // Rows whose gradient does not vanish in exact arithmetic.
  std::vector<std::pair<int64_t, int64_t>> kept_rows(const std::string& name,
                                                     const Tensor& t) const {
    for (const json& v : golden_.vanishing)
      if (name == v["name"].get<std::string>())
        return {{0, v["rows"][0]}, {v["rows"][1], t.size(0)}};
    return {{0, t.size(0)}};
  }
  const Golden& golden_;
  double bound_;
};

std::vector<NamedTensor> gradients(Gpt& model) {
  std::vector<NamedTensor> out;
  for (auto& [name, p] : model.named_parameters()) out.push_back({name, p.grad()});
  return models::to_gpt2_order(std::move(out), model.options.heads);
}

std::vector<NamedTensor> weights(Gpt& model) {
  std::vector<NamedTensor> out;
  for (auto& [name, p] : model.named_parameters()) out.push_back({name, p.detach()});
  return models::to_gpt2_order(std::move(out), model.options.heads);
}

void train_and_compare(const std::string& name, DType dtype) {
  Golden g(name);
  std::string run = dtype == kF64 ? "fp64" : "fp32";
  Comparison compare(g, dtype == kF64 ? 1e-9 : 1e-5);
  auto model = models::gpt(g.options);
  model->to(dtype);
  model->load_state(models::from_gpt2_order(g.under("init"), g.options.heads));
  const json& o = g.optimizer;
  optim::AdamW opt(optim::decay_matrices_only(model->named_parameters(), o["weight_decay"]),
                   {.lr = o["lr"], .betas = {o["betas"][0], o["betas"][1]}, .eps = o["eps"]});

  Tensor ids = g.file.load("ids"), targets = g.file.load("targets");
  {
    NoGrad off;
    compare.by_max("logits", (*model)(ids[0]), g.file.load(run + "/logits"));
  }
  Tensor losses = g.file.load(run + "/losses").to(kF64),
         norms = g.file.load(run + "/grad_norms").to(kF64);
  double bound = dtype == kF64 ? 1e-9 : 1e-5;
  for (int step = 0; step < int(o["steps"]); ++step) {
    opt.zero_grad();
    Tensor loss = model->loss(ids[step], targets[step]);
    EXPECT_NEAR(loss.item<double>(), losses[step].item<double>(),
                bound * losses[step].item<double>())
        << "step " << step;
    loss.backward();
    if (step == 0)
      for (auto& [p, grad] : gradients(*model))
        compare.by_max(p, grad, g.file.load(run + "/grad/" + p));
    auto clip = optim::clip_grad_norm(model->parameters(), o["clip_norm"]);
    EXPECT_NEAR(clip.norm.item<double>(), norms[step].item<double>(),
                bound * norms[step].item<double>())
        << "step " << step;
    opt.step(clip.scale);
  }
  auto final_weights = weights(*model);
  ASSERT_EQ(final_weights.size(), g.under(run + "/final").size());
  for (auto& [p, w] : final_weights) compare.by_norm(p, w, g.file.load(run + "/final/" + p));
}

TEST(GoldenGpt, Fp64) { train_and_compare("gpt_tiny.safetensors", kF64); }
TEST(GoldenGpt, Fp32) { train_and_compare("gpt_tiny.safetensors", kF32); }
TEST(GoldenGpt, OptionsFp64) { train_and_compare("gpt_tiny_options.safetensors", kF64); }
TEST(GoldenGpt, OptionsFp32) { train_and_compare("gpt_tiny_options.safetensors", kF32); }

}  // namespace
}  // namespace tessera
