// A function that fails in backward when a test says so.
#pragma once
#include "core/autograd/autograd.h"

namespace tessera {

// The identity, whose derivative fails as long as `fails` holds.
class Unreliable final : public CustomFunction {
 public:
  explicit Unreliable(const bool& fails) : fails_(fails) {}
  std::string_view name() const override { return "unreliable"; }
  Tensors forward(std::span<const Tensor> in) override { return {in[0]}; }
  Tensors vjp(std::span<const Tensor>, std::span<const Tensor> cot) override {
    TESSERA_CHECK(!fails_, "unreliable: no derivative today");
    return {cot[0]};
  }

 private:
  const bool& fails_;
};

}  // namespace tessera
