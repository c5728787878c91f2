// The primitive of a quantised layer, which holds what its kernel keeps between calls.
#pragma once
#include <memory>
#include <mutex>
#include <string>

#include "core/ops/quantized_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera {

/// What a kernel makes once from the constant operands of an op: packed weights, generated code.
struct PreparedLayer {
  virtual ~PreparedLayer() = default;
  /// The library's name for the code that runs: "brgconv:avx512_core_vnni".
  virtual std::string kernel() const = 0;
};

class QuantizedLayer : public PrimitiveWith<QuantizedLayerAttributes> {
 public:
  using PrimitiveWith::PrimitiveWith;

  /// Kept by the kernel between calls and freed with the op. No result depends on it.
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
