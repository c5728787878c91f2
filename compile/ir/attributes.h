// The attributes of an op as a list of values. Graphs are compared by these lists, number by
// number, and written to files with them. Invariant: remake(prim, attributes_of(prim)) is the same
// op.
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

/// Lists the attributes in the order in which the op names them.
Attributes attributes_of(const Primitive& prim);
/// Makes the op of `like` with other attributes. Throws UserError where an attribute is missing,
/// has a value of the wrong kind, or is unknown to the op.
PrimRef remake(const Primitive& like, const Attributes& attributes);

}  // namespace tessera::compiler
