#include "compile/codegen/functors.h"

#include <unordered_map>

#include "core/base/error.h"
#include "core/ops/pointwise_columns.h"

namespace tessera::compiler {
namespace {

std::unordered_map<std::string_view, Functor> make_functors() {
  using namespace columns;
  return {
#define TESSERA_OP1(name, kernel, kind, precision, cost, facts, ...) \
  {#name, {1, kind == kTest, (unsigned{facts} & kInGroups) != 0}},
#define TESSERA_OP2(name, kernel, kind, precision, cost, facts, ...) \
  {#name, {2, kind == kTest, (unsigned{facts} & kInGroups) != 0}},
#define TESSERA_OP3(name, kernel, kind, precision, cost, facts, ...) \
  {#name, {3, kind == kTest, (unsigned{facts} & kInGroups) != 0}},
#include "core/ops/pointwise.def"
  };
}

}  // namespace

std::string_view embedded(std::string_view path) {
  for (size_t i = 0; i < kEmbeddedCount; ++i)
    if (kEmbedded[i].path == path) return kEmbedded[i].text;
  throw BugError("codegen: " + std::string(path) + " is not embedded");
}

const Functor* find_functor(std::string_view op) {
  static const auto functors = make_functors();
  auto it = functors.find(op);
  return it == functors.end() ? nullptr : &it->second;
}

}  // namespace tessera::compiler
