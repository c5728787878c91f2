#include "core/nn/layers.h"

#include <cmath>

#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/fused.h"
#include "core/ops/random.h"
#include "core/ops/views.h"

namespace tessera::nn {
// ---- Linear

Linear::Linear(LinearOptions o) : options(o) {
  TESSERA_CHECK(o.in > 0 && o.out > 0, "linear: in={} and out={} must be positive", o.in, o.out);
  register_parameter("weight", weight, empty_parameter({o.out, o.in}));
  register_parameter("bias", bias, o.bias ? empty_parameter({o.out}) : Tensor());
  draw();
}

void Linear::reset(const InitKeys& keys) {
  kaiming_uniform_(weight, std::sqrt(5.0), keys.key("weight"));
  double bound = 1 / std::sqrt(double(options.in));
  if (bias.defined()) uniform_(bias, -bound, bound, keys.key("bias"));
  if (product_) product_->reset();
}

void Linear::multiply_by(std::shared_ptr<LinearProduct> product) {
  // Its buffers are the module's from now on.
  TESSERA_CHECK(!product_, "multiply_by: this layer has another product already ({})", describe());
  product_ = std::move(product);
  product_changes_.note_change();
}

Tensor Linear::forward(Tensor x) {
  product_changes_.note_use();
  return product_ ? (*product_)(x, weight, bias, training()) : tessera::linear(x, weight, bias);
}

std::string Linear::describe() const {
  return fmt::format("in={}, out={}, bias={}{}", options.in, options.out, options.bias,
                     product_ ? ", " + product_->describe() : "");
}

// ---- Embedding

Embedding::Embedding(EmbeddingOptions o) : options(o) {
  TESSERA_CHECK(o.count > 0 && o.dim > 0, "embedding: count={} and dim={} must be positive",
                o.count, o.dim);
  TESSERA_CHECK(o.padding_idx >= -1 && o.padding_idx < o.count,
                "embedding: padding_idx={} is not a row of {}; -1 for none", o.padding_idx,
                o.count);
  register_parameter("weight", weight, empty_parameter({o.count, o.dim}));
  draw();
}

void Embedding::reset(const InitKeys& keys) {
  normal_(weight, 0, 1, keys.key("weight"));
  if (options.padding_idx >= 0) zeros_(select(weight.detach(), 0, options.padding_idx));
}

Tensor Embedding::forward(Tensor ids) {
  return tessera::embedding(ids, weight, options.padding_idx);
}

std::string Embedding::describe() const {
  std::string text = fmt::format("count={}, dim={}", options.count, options.dim);
  return options.padding_idx < 0 ? text
                                 : text + fmt::format(", padding_idx={}", options.padding_idx);
}

// ---- LayerNorm, RMSNorm

LayerNorm::LayerNorm(NormOptions o) : options(o) {
  TESSERA_CHECK(o.dim > 0, "layer_norm: dim={} must be positive", o.dim);
  register_parameter("weight", weight, empty_parameter({o.dim}));
  register_parameter("bias", bias, o.bias ? empty_parameter({o.dim}) : Tensor());
  draw();
}

void LayerNorm::reset(const InitKeys&) {
  ones_(weight);
  if (bias.defined()) zeros_(bias);
}

Tensor LayerNorm::forward(Tensor x) { return tessera::layer_norm(x, weight, bias, options.eps); }

std::string LayerNorm::describe() const {
  return fmt::format("dim={}, eps={}, bias={}", options.dim, options.eps, options.bias);
}

RMSNorm::RMSNorm(NormOptions o) : options(o) {
  TESSERA_CHECK(o.dim > 0, "rms_norm: dim={} must be positive", o.dim);
  register_parameter("weight", weight, empty_parameter({o.dim}));
  draw();
}

void RMSNorm::reset(const InitKeys&) { ones_(weight); }

Tensor RMSNorm::forward(Tensor x) { return tessera::rms_norm(x, weight, options.eps); }

std::string RMSNorm::describe() const {
  return fmt::format("dim={}, eps={}", options.dim, options.eps);
}

// ---- Dropout, Flatten

Dropout::Dropout(double p) : p(p) {
  TESSERA_CHECK(p >= 0 && p <= 1, "dropout: p={} is not in [0, 1]", p);
}

Tensor Dropout::forward(Tensor x) { return training() && p > 0 ? tessera::dropout(x, p) : x; }

std::string Dropout::describe() const { return fmt::format("p={}", p); }

Tensor Dropout2d::forward(Tensor x) { return training() && p > 0 ? tessera::dropout2d(x, p) : x; }

Tensor Flatten::forward(Tensor x) { return tessera::flatten(x, first_, last_); }

// ---- activations

Softmax::Softmax(int64_t dim)
    : Activation("Softmax", [=](Tensor x) { return tessera::softmax(x, dim); }) {}
LogSoftmax::LogSoftmax(int64_t dim)
    : Activation("LogSoftmax", [=](Tensor x) { return tessera::log_softmax(x, dim); }) {}

PReLU::PReLU(int64_t count, double start) : start(start) {
  TESSERA_CHECK(count > 0, "prelu: count={} must be positive", count);
  register_parameter("weight", weight, empty_parameter(count));
  draw();
}

void PReLU::reset(const InitKeys&) { constant_(weight, start); }

Tensor PReLU::forward(Tensor x) { return tessera::prelu(x, weight); }

std::string PReLU::describe() const { return fmt::format("count={}", weight.numel()); }

// ---- factories

LinearPtr linear(LinearOptions o) { return std::make_shared<Linear>(o); }
LinearPtr linear(int64_t in, int64_t out, bool bias) {
  return std::make_shared<Linear>(in, out, bias);
}
EmbeddingPtr embedding(EmbeddingOptions o) { return std::make_shared<Embedding>(o); }
EmbeddingPtr embedding(int64_t count, int64_t dim) {
  return embedding({.count = count, .dim = dim});
}
LayerNormPtr layer_norm(NormOptions o) { return std::make_shared<LayerNorm>(o); }
LayerNormPtr layer_norm(int64_t dim) { return layer_norm({.dim = dim}); }
std::shared_ptr<RMSNorm> rms_norm(NormOptions o) { return std::make_shared<RMSNorm>(o); }
std::shared_ptr<RMSNorm> rms_norm(int64_t dim) { return rms_norm({.dim = dim}); }
DropoutPtr dropout(double p) { return std::make_shared<Dropout>(p); }
std::shared_ptr<Dropout2d> dropout2d(double p) { return std::make_shared<Dropout2d>(p); }
std::shared_ptr<Flatten> flatten(int64_t first, int64_t last) {
  return std::make_shared<Flatten>(first, last);
}

ActivationPtr activation(std::string name, std::function<Tensor(Tensor)> function) {
  return std::make_shared<Activation>(std::move(name), std::move(function));
}
ActivationPtr relu() { return std::make_shared<ReLU>(); }
ActivationPtr gelu() { return std::make_shared<GELU>(); }
ActivationPtr gelu_tanh() { return activation("GELUTanh", tessera::gelu_tanh); }
ActivationPtr silu() { return std::make_shared<SiLU>(); }
ActivationPtr tanh() { return std::make_shared<Tanh>(); }
ActivationPtr sigmoid() { return std::make_shared<Sigmoid>(); }
ActivationPtr mish() { return std::make_shared<Mish>(); }
ActivationPtr leaky_relu(double slope) { return std::make_shared<LeakyReLU>(slope); }
ActivationPtr elu(double alpha) { return std::make_shared<ELU>(alpha); }
ActivationPtr softmax(int64_t dim) { return std::make_shared<Softmax>(dim); }
ActivationPtr log_softmax(int64_t dim) { return std::make_shared<LogSoftmax>(dim); }
ActivationPtr identity() { return std::make_shared<Identity>(); }
std::shared_ptr<PReLU> prelu(int64_t count, double start) {
  return std::make_shared<PReLU>(count, start);
}

}  // namespace tessera::nn
