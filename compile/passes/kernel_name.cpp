#include "compile/passes/kernel_name.h"

#include <algorithm>
#include <vector>

namespace tessera::compiler {
namespace {

constexpr size_t kMaxOps = 5;

bool is_plain(std::string_view op) {
  constexpr std::string_view plain[] = {"add",  "sub",  "mul",   "div",   "neg",
                                        "cast", "copy", "where", "square"};
  return std::ranges::count(plain, op) > 0;
}

}  // namespace

std::string kernel_name(const Graph& g, std::span<const int32_t> nodes) {
  std::string name = g.scopes[size_t(g.nodes[size_t(nodes.back())].scope)];
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  std::vector<std::string_view> ops;
  for (int32_t k : nodes) {
    std::string_view op = g.nodes[size_t(k)].prim->name();
    if (!std::ranges::count(ops, op)) ops.push_back(op);
  }
  if (ops.size() > 2 && !std::ranges::all_of(ops, is_plain)) std::erase_if(ops, is_plain);
  if (ops.size() > kMaxOps) ops.resize(kMaxOps);
  for (std::string_view op : ops) name += (name.empty() ? "" : "_") + std::string(op);
  bool digit = std::isdigit(static_cast<unsigned char>(name[0])) != 0;
  return digit ? "module_" + name : name;
}

}  // namespace tessera::compiler
