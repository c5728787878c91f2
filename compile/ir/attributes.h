// The attributes of an op as a list of values: what graphs are compared by, number by number, and
// written to files as. Invariant: remake(prim, attributes_of(prim)) is the same op.
#pragma once
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "core/primitive/primitive.h"

namespace tessera::compiler {

using AttributeValue = std::variant<int64_t, double, std::string, std::vector<int64_t>>;
struct Attribute {
  std::string name;
  AttributeValue value;
  bool operator==(const Attribute&) const = default;
};
using Attributes = std::vector<Attribute>;

/// In the order in which the op names them.
Attributes attributes_of(const Primitive& prim);
/// The op of `like` with other attributes. Throws UserError where one is missing, is no such value,
/// or belongs to no such op.
PrimRef remake(const Primitive& like, const Attributes& attributes);

}  // namespace tessera::compiler
