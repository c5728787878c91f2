// Printing graphs.
#include "compile/ir/graph.h"

#include <fmt/format.h>

namespace tessera::compiler {
namespace {

// "%1, %2", and "%3..%20" where at least four ids follow each other.
std::string ids_text(const ValueIds& ids) {
  std::string text;
  for (size_t i = 0; i < ids.size();) {
    size_t end = i + 1;
    while (end < ids.size() && ids[end] == ids[end - 1] + 1) ++end;
    if (end - i < 4 || ids[i] == kNoValue) end = i + 1;
    std::string id = ids[i] == kNoValue ? "new" : fmt::format("%{}", ids[i]);
    text += (text.empty() ? "" : ", ") + id;
    if (end - i > 1) text += fmt::format("..%{}", ids[end - 1]);
    i = end;
  }
  return text;
}

// "f32[2, 3]", with strides where they are not those of a dense tensor.
std::string type_text(const Meta& m) {
  std::string text = fmt::format("{}{}", name_of(m.dtype), tessera::to_string(m.shape));
  if (!is_contiguous(m.shape, m.strides)) text += " strides " + tessera::to_string(m.strides);
  return text;
}

std::string types_text(const Graph& g, const ValueIds& ids) {
  constexpr size_t kShown = 3;
  std::string text;
  for (size_t i = 0; i < ids.size() && i < kShown; ++i)
    text += fmt::format("{}{}", i ? ", " : "", type_text(g[ids[i]].meta));
  if (ids.size() > kShown) text += fmt::format(", .. ({} in all)", ids.size());
  return text;
}

// "sum(%3; mask=2, keepdim=0)".
std::string call_text(const Node& n) {
  if (!n.prim) return "null()";
  std::string prim = tessera::to_string(*n.prim), operands = ids_text(n.in);
  size_t open = prim.find('(');
  if (open == std::string::npos) return fmt::format("{}({})", prim, operands);
  std::string attributes = prim.substr(open + 1, prim.size() - open - 2);
  return fmt::format("{}({}{}{})", prim.substr(0, open), operands, operands.empty() ? "" : "; ",
                     attributes);
}

}  // namespace

std::string_view name_of(Role role) {
  constexpr std::string_view names[kNumRoles] = {"compute", "view", "constant", "collective"};
  return names[int(role)];
}

std::string to_string(const Graph& g, const Node& n) {
  std::string text = fmt::format("{} = {}", ids_text(n.out), call_text(n));
  if (!n.into.empty()) text += " into " + ids_text(n.into);
  // Invalid graphs are printed too, so an index may be out of range.
  std::string from = size_t(n.scope) < g.scopes.size() ? g.scopes[size_t(n.scope)] : "?";
  if (!from.empty()) from += " ";
  from += int(n.phase) < kNumPhases ? name_of(n.phase) : "?";
  return fmt::format("{} : {}  # {}", text, types_text(g, n.out), from);
}

std::string to_string(const Graph& g) {
  std::string text = g.deterministic ? "deterministic\n" : "";
  for (ValueId id : g.inputs) text += fmt::format("input %{} : {}\n", id, type_text(g[id].meta));
  for (const ImplicitInput& i : g.implicit)
    text += fmt::format("implicit %{} : {}{}\n", i.id, type_text(g[i.id].meta),
                        i.name.empty() ? "" : "  # " + i.name);
  for (ValueId id : g.shapes) text += fmt::format("shape %{} : {}\n", id, type_text(g[id].meta));
  for (const Node& n : g.nodes) text += to_string(g, n) + "\n";
  return text + fmt::format("return {}\n", ids_text(ValueIds(g.outputs.begin(), g.outputs.end())));
}

}  // namespace tessera::compiler
