#include "compile/codegen/functors.h"

#include <algorithm>
#include <unordered_map>

#include "core/base/error.h"

namespace tessera::compiler {
namespace {

std::string_view between(std::string_view line, std::string_view before, std::string_view after) {
  size_t begin = line.find(before);
  if (begin == line.npos) return {};
  begin += before.size();
  return line.substr(begin, line.find(after, begin) - begin);
}

// One op a line: struct Exp { static constexpr const char* name = "exp"; .. T apply(T x) ..
std::unordered_map<std::string_view, Functor> read_functors() {
  std::unordered_map<std::string_view, Functor> found;
  std::string_view text = embedded("core/ops/functors/pointwise.h");
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    std::string_view op = between(line, "name = \"", "\"");
    if (op.empty()) continue;
    std::string_view parameters = between(line, " apply(", ")");
    found[op] = {between(line, "struct ", " "),
                 1 + int(std::count(parameters.begin(), parameters.end(), ',')),
                 line.find("bool apply(") != line.npos,
                 line.find("bool in_groups = true") != line.npos};
  }
  return found;
}

}  // namespace

std::string_view embedded(std::string_view path) {
  for (size_t i = 0; i < kEmbeddedCount; ++i)
    if (kEmbedded[i].path == path) return kEmbedded[i].text;
  throw BugError("codegen: " + std::string(path) + " is not embedded");
}

const Functor* find_functor(std::string_view op) {
  static const auto functors = read_functors();
  auto it = functors.find(op);
  return it == functors.end() ? nullptr : &it->second;
}

}  // namespace tessera::compiler
