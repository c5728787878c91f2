// The texts of core/ops/functors, embedded when Tessera was built, and what code generators ask of
// the functors in them.
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
  int arity = 0;
  bool to_bool = false;
  bool in_groups = false;  // loops over floats take it in groups
};
/// What holds of functors::`op`; null where there is none (of "where").
const Functor* find_functor(std::string_view op);

}  // namespace tessera::compiler
