// The texts of core/ops/functors, embedded when Tessera was built, and what can be read off them:
// which functor an op is, and how many operands it takes.
#pragma once
#include <string_view>

namespace tessera::compiler {

struct Embedded {
  std::string_view path, text;
};
extern const Embedded kEmbedded[];
extern const size_t kEmbeddedCount;

/// The text of `path` ("core/ops/functors/math.h").
std::string_view embedded(std::string_view path);

struct Functor {
  std::string_view type;  // "GeluGrad"
  int arity = 0;
  bool to_bool = false;
  bool in_groups = false;  // loops over floats take it in groups
};
/// The functor of pointwise op `op`, or null ("where" has none).
const Functor* find_functor(std::string_view op);

}  // namespace tessera::compiler
