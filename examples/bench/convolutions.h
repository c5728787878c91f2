// Convolutions as a bare library call: what contractions.h is for matrix products. Activations lie
// channels-last and weights in the layout that oneDNN chooses, as nothing but the arithmetic is to
// be timed: no packing of weights, no copies.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "core/ops/conv_attributes.h"

namespace tessera::bench {

/// One of the three ops of the family; see conv_attributes.h for x, w and y.
struct Convolution {
  enum class Into : uint8_t { kY, kX, kW };  // which operand is summed into
  Into into = Into::kY;
  Shape x, w, y;
  ConvAttributes::Window window;
  bool bf16 = false;
  double flops() const;
  /// All of the above as text; different ones differ in it.
  std::string text() const;
};

/// The convolution that `prim` on `in` is; nothing for other ops, for f64 and for f16.
std::optional<Convolution> convolution_of(const Primitive& prim, std::span<const Tensor> in);

/// A convolution prepared for timing, with operands of its own.
class BareConvolution {
 public:
  explicit BareConvolution(const Convolution& c);
  ~BareConvolution();
  BareConvolution(BareConvolution&&) noexcept;
  void run();
  std::string implementation() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::bench
