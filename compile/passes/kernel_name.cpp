#include "compile/passes/kernel_name.h"

#include <algorithm>
#include <vector>

namespace tessera::compiler {
namespace {

constexpr size_t kMaxOps = 5;

bool is_plain(const Primitive* op) { return op->traits().plain; }

}  // namespace

std::string kernel_name(const Graph& g, std::span<const int32_t> nodes) {
  std::string name = g.scopes[size_t(g.nodes[size_t(nodes.back())].scope)];
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  std::vector<const Primitive*> ops;
  for (int32_t k : nodes) {
    const Primitive* op = g.nodes[size_t(k)].prim.get();
    if (!std::ranges::count(ops, op->id(), &Primitive::id)) ops.push_back(op);
  }
  if (ops.size() > 2 && !std::ranges::all_of(ops, is_plain)) std::erase_if(ops, is_plain);
  if (ops.size() > kMaxOps) ops.resize(kMaxOps);
  for (const Primitive* op : ops) name += (name.empty() ? "" : "_") + std::string(op->name());
  bool digit = std::isdigit(static_cast<unsigned char>(name[0])) != 0;
  return digit ? "module_" + name : name;
}

}  // namespace tessera::compiler
