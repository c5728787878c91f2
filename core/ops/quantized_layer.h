// The op of a quantised layer with what its kernel keeps between calls.
#pragma once
#include <memory>
#include <mutex>
#include <string>

#include "core/ops/quantized_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera {

/// What a kernel made of the constant operands of one op: packed weights, generated code.
struct PreparedLayer {
  virtual ~PreparedLayer() = default;
  /// The library's name of the code that runs: "brgconv:avx512_core_vnni".
  virtual std::string kernel() const = 0;
};

class QuantizedLayer : public PrimitiveWith<QuantizedLayerAttributes> {
 public:
  using PrimitiveWith::PrimitiveWith;

  /// Kept by the kernel between calls and freed with the op. It shows in no result.
  std::shared_ptr<const PreparedLayer> prepared() const {
    std::lock_guard lock(mutex_);
    return prepared_;
  }
  void keep(std::shared_ptr<const PreparedLayer> prepared) const {
    std::lock_guard lock(mutex_);
    prepared_ = std::move(prepared);
  }

 private:
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const PreparedLayer> prepared_;
};

}  // namespace tessera
