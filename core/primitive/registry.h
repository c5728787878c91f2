// Every op, with sample inputs. Tests walk this list: an op without samples fails the suite. Each
// family of ops has a registration function, and core/ops/register.cpp calls them all by name, so
// static linking cannot drop one.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/primitive/primitive.h"

namespace tessera {

/// One call of an op, on which its shapes, gradients, sharding and tracing are tested.
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
