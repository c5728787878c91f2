// A backward inside of another one, as activation checkpointing by hand has it.
#pragma once
#include <functional>

#include "core/autograd/autograd.h"

namespace tessera {

// y = f(x). Keeps x only and computes f again in backward, by a backward of its own, where the
// gradients of what `f` reads besides are accumulated.
class Checkpointed final : public CustomFunction {
 public:
  using F = std::function<Tensor(const Tensor&)>;
  explicit Checkpointed(F f) : f_(std::move(f)) {}
  std::string_view name() const override { return "checkpointed"; }
  Tensors forward(std::span<const Tensor> in) override {
    save(in[0]);
    return {f_(in[0])};
  }
  Tensors vjp(std::span<const Tensor> saved, std::span<const Tensor> cot) override {
    EnableGrad on;
    Tensor again = saved[0].detach().clone().requires_grad_();
    backward(f_(again), cot[0]);
    return {again.grad()};
  }

 private:
  F f_;
};
inline Tensor checkpointed(const Tensor& x, Checkpointed::F f) {
  return apply_function(make_ref<Checkpointed>(std::move(f)), {&x, 1})[0];
}

}  // namespace tessera
