// Convolutions as bare library calls, as contractions.h has matrix products. Activations are
// channels-last and weights in the layout that oneDNN chooses, since only the arithmetic is to be
// timed: no packing of weights, no copies.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "core/ops/conv_attributes.h"
#include "core/primitive/primitive.h"

namespace tessera::bench {

/// One of the three ops of a convolution and its gradients; see conv_attributes.h for x, w and y.
struct Convolution {
  enum class Into : uint8_t { kY, kX, kW };  // the operand that the op computes
  Into into = Into::kY;
  Shape x, w, y;
  ConvAttributes::Window window;
  bool bf16 = false;
  double flops() const;
  /// Returns all of the above as text; different convolutions have different texts.
  std::string text() const;
};

/// Returns the convolution that `prim` on `in` computes; nothing for other ops, for f64 and for
/// f16.
std::optional<Convolution> convolution_of(const Primitive& prim, std::span<const Tensor> in);

/// A convolution that is prepared for timing, with operands of its own.
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
