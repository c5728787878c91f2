// A tensor with its name: module state, optimizer state and weight files are lists of these.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor/tensor.h"

namespace tessera {

struct NamedTensor {
  std::string name;
  Tensor tensor;
};

/// What is wrong with a state that is about to be loaded. It is collected first, so that one error
/// names all of it.
struct StateMisfit {
  std::vector<std::string> missing, unexpected, mismatched;

  void compare(const std::string& name, const Tensor& own, const Tensor& given);
  /// Throws UserError with the lists unless all are empty.
  void check(std::string_view who) const;
};

}  // namespace tessera
