// Layers with one input and one result, initialised as PyTorch does. Each is a class with public
// slots, `nn::Linear fc{784, 128};` as a member of a module, and has a function that makes a shared
// one, `nn::linear(784, 128)` for a Sequential.
#pragma once
#include "core/nn/module.h"
#include "core/ops/pointwise.h"

namespace tessera::nn {

struct LinearOptions {
  int64_t in = 0, out = 0;
  bool bias = true;
};
/// Another way to compute what a Linear computes (fp8.h).
class LinearProduct {
 public:
  virtual ~LinearProduct() = default;
  /// x [.., in], weight [out, in], bias [out] or undefined -> x weight^T + bias [.., out].
  virtual Tensor operator()(const Tensor& x, const Tensor& weight, const Tensor& bias,
                            bool training) = 0;
  /// Gives the buffers that it registered their first values.
  virtual void reset() = 0;
  virtual std::string describe() const = 0;
};

/// x [.., in] -> x weight^T + bias [.., out]. weight [out, in], bias [out]: uniform in
/// +-1/sqrt(in).
class Linear : public Module {
 public:
  explicit Linear(LinearOptions options);
  Linear(int64_t in, int64_t out, bool bias = true) : Linear(LinearOptions{in, out, bias}) {}
  std::string describe() const override;
  void reset(const InitKeys& keys) override;
  /// Lets `product` compute the result from now on. Throws UserError where one does already.
  void multiply_by(std::shared_ptr<LinearProduct> product);
  const std::shared_ptr<LinearProduct>& product() const { return product_; }
  Tensor weight, bias;
  const LinearOptions options;

 protected:
  Tensor forward(Tensor x) override;

 private:
  std::shared_ptr<LinearProduct> product_;
  TrackedChanges product_changes_;
};

struct EmbeddingOptions {
  int64_t count = 0, dim = 0;
  int64_t padding_idx = -1;  // this row starts at zero and gets no gradient; -1: none
};
/// ids [..] (i64 or i32) -> rows of weight [.., dim]. weight [count, dim]: standard normal.
class Embedding : public Module {
 public:
  explicit Embedding(EmbeddingOptions options);
  Embedding(int64_t count, int64_t dim) : Embedding(EmbeddingOptions{count, dim}) {}
  std::string describe() const override;
  void reset(const InitKeys& keys) override;
  Tensor weight;
  const EmbeddingOptions options;

 protected:
  Tensor forward(Tensor ids) override;
};

struct NormOptions {
  int64_t dim = 0;
  double eps = 1e-5;
  bool bias = true;  // layer norm only
};
/// Normalises the last dim: layer_norm of core/ops/fused.h. weight [dim] of ones, bias [dim] of
/// zeros.
class LayerNorm : public Module {
 public:
  explicit LayerNorm(NormOptions options);
  explicit LayerNorm(int64_t dim) : LayerNorm(NormOptions{dim}) {}
  std::string describe() const override;
  void reset(const InitKeys& keys) override;
  Tensor weight, bias;
  const NormOptions options;

 protected:
  Tensor forward(Tensor x) override;
};

/// x / sqrt(mean(x^2) + eps) * weight over the last dim. weight [dim] of ones.
class RMSNorm : public Module {
 public:
  explicit RMSNorm(NormOptions options);
  explicit RMSNorm(int64_t dim) : RMSNorm(NormOptions{dim}) {}
  std::string describe() const override;
  void reset(const InitKeys& keys) override;
  Tensor weight;
  const NormOptions options;

 protected:
  Tensor forward(Tensor x) override;
};

/// While training: zeroes elements with probability p and divides the others by 1 - p. Otherwise
/// the identity.
class Dropout : public Module {
 public:
  explicit Dropout(double p = 0.5);
  std::string describe() const override;
  const double p;

 protected:
  Tensor forward(Tensor x) override;
};

/// Dropout that zeroes whole channels of x [N, C, H, W].
class Dropout2d final : public Dropout {
 public:
  using Dropout::Dropout;

 protected:
  Tensor forward(Tensor x) override;
};

/// A function of one tensor as a module.
class Activation : public Module {
 public:
  Activation(std::string name, std::function<Tensor(Tensor)> function)
      : name_(std::move(name)), function_(std::move(function)) {}
  std::string type_name() const override { return name_; }

 protected:
  Tensor forward(Tensor x) override { return function_(std::move(x)); }

 private:
  std::string name_;
  std::function<Tensor(Tensor)> function_;
};

struct ReLU final : Activation {
  ReLU() : Activation("ReLU", tessera::relu) {}
};
struct GELU final : Activation {
  GELU() : Activation("GELU", tessera::gelu) {}
};
struct SiLU final : Activation {
  SiLU() : Activation("SiLU", tessera::silu) {}
};
struct Mish final : Activation {
  Mish() : Activation("Mish", tessera::mish) {}
};
struct Tanh final : Activation {
  Tanh() : Activation("Tanh", tessera::tanh) {}
};
struct Sigmoid final : Activation {
  Sigmoid() : Activation("Sigmoid", tessera::sigmoid) {}
};
struct Identity final : Activation {
  Identity() : Activation("Identity", [](Tensor x) { return x; }) {}
};
struct LeakyReLU final : Activation {
  explicit LeakyReLU(double slope = 0.01)
      : Activation("LeakyReLU",
                   [=](Tensor x) { return tessera::leaky_relu(std::move(x), slope); }) {}
};
struct ELU final : Activation {
  explicit ELU(double alpha = 1)
      : Activation("ELU", [=](Tensor x) { return tessera::elu(std::move(x), alpha); }) {}
};
struct Softmax final : Activation {
  explicit Softmax(int64_t dim = -1);
};
struct LogSoftmax final : Activation {
  explicit LogSoftmax(int64_t dim = -1);
};

/// x where it is positive, elsewhere weight x: one weight, or one per channel (dim 1). weight
/// [count] of `start`. He et al. 2015.
class PReLU final : public Module {
 public:
  explicit PReLU(int64_t count = 1, double start = 0.25);
  std::string describe() const override;
  void reset(const InitKeys& keys) override;
  Tensor weight;
  const double start;

 protected:
  Tensor forward(Tensor x) override;
};

/// [B, ..] -> [B, product of the rest], or from `first` to `last`.
class Flatten : public Module {
 public:
  explicit Flatten(int64_t first = 1, int64_t last = -1) : first_(first), last_(last) {}

 protected:
  Tensor forward(Tensor x) override;

 private:
  int64_t first_, last_;
};

using LinearPtr = std::shared_ptr<Linear>;
using EmbeddingPtr = std::shared_ptr<Embedding>;
using LayerNormPtr = std::shared_ptr<LayerNorm>;
using DropoutPtr = std::shared_ptr<Dropout>;
using ActivationPtr = std::shared_ptr<Activation>;

LinearPtr linear(LinearOptions options);
LinearPtr linear(int64_t in, int64_t out, bool bias = true);
EmbeddingPtr embedding(EmbeddingOptions options);
EmbeddingPtr embedding(int64_t count, int64_t dim);
LayerNormPtr layer_norm(NormOptions options);
LayerNormPtr layer_norm(int64_t dim);
std::shared_ptr<RMSNorm> rms_norm(NormOptions options);
std::shared_ptr<RMSNorm> rms_norm(int64_t dim);
DropoutPtr dropout(double p = 0.5);
std::shared_ptr<Dropout2d> dropout2d(double p = 0.5);
std::shared_ptr<Flatten> flatten(int64_t first = 1, int64_t last = -1);
/// Any function as a module: activation("Square", tessera::square).
ActivationPtr activation(std::string name, std::function<Tensor(Tensor)> function);
ActivationPtr relu();
ActivationPtr gelu();
ActivationPtr gelu_tanh();
ActivationPtr silu();
ActivationPtr tanh();
ActivationPtr sigmoid();
ActivationPtr mish();
ActivationPtr leaky_relu(double slope = 0.01);
ActivationPtr elu(double alpha = 1);
ActivationPtr softmax(int64_t dim = -1);
ActivationPtr log_softmax(int64_t dim = -1);
ActivationPtr identity();
std::shared_ptr<PReLU> prelu(int64_t count = 1, double start = 0.25);

}  // namespace tessera::nn
