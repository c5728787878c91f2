// Every op, with inputs to try it on. Tests walk this list: an op without samples fails the suite.
// Registration is an explicit function per family (core/ops/register.cpp calls them all), so static
// linking cannot lose one.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/primitive/primitive.h"

namespace tessera {

/// One call of an op: checked for shapes, gradients, sharding, tracing.
struct Sample {
  PrimRef prim;
  std::vector<Tensor> in;  // f64 where the op takes floats, away from kinks and poles
  bool smooth = true;  // finite differences are meaningful (false: sorting with ties, random draws)
};

struct OpEntry {
  std::string name;
  std::function<std::vector<Sample>()> samples;
};

class OpRegistry {
 public:
  void add(std::string_view name, std::function<std::vector<Sample>()> samples);
  const std::vector<OpEntry>& entries() const { return entries_; }

 private:
  std::vector<OpEntry> entries_;
};

/// All registered ops, in registration order.
const OpRegistry& op_registry();

}  // namespace tessera
