// A tensor and what it is called: the currency of module state, optimizer state and weight files.
#pragma once
#include <string>

#include "core/tensor/tensor.h"

namespace tessera {

struct NamedTensor {
  std::string name;
  Tensor tensor;
};

}  // namespace tessera
