#include "compile/debug/draw.h"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>

#include "compile/codegen/fused.h"

extern char** environ;

namespace tessera::compiler {
namespace {

std::string in_quotes(std::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

std::string type_of(const Value& v) {
  return fmt::format("{}{}", name_of(v.meta.dtype), tessera::to_string(v.meta.shape));
}

class Drawing {
 public:
  explicit Drawing(const Graph& g) : g_(g), maker_(g.values.size()) {}

  std::string text() {
    for (ValueId id : g_.inputs) source(id, "input");
    for (const ImplicitInput& i : g_.implicit) source(i.id, i.name.empty() ? "state" : i.name);
    for (ValueId id : g_.shapes) source(id, "shape");
    std::map<int32_t, std::string> boxes;  // by scope
    for (size_t k = 0; k < g_.nodes.size(); ++k) boxes[g_.nodes[k].scope] += box(k);
    for (size_t i = 0; i < g_.outputs.size(); ++i) {
      text_ += fmt::format("  out{} [label=\"output {}\", shape=ellipse];\n", i, i);
      text_ += fmt::format("  {} -> out{};\n", maker_[size_t(g_.outputs[i])], i);
    }
    std::string clusters;
    for (const auto& [scope, text] : boxes) {
      const std::string& path = g_.scopes[size_t(scope)];
      clusters += path.empty() ? text
                               : fmt::format("  subgraph cluster_{} {{\n  label={};\n{}  }}\n",
                                             scope, in_quotes(path), text);
    }
    return "digraph step {\n  node [shape=box, fontname=\"monospace\", style=filled];\n" +
           clusters + text_ + "}\n";
  }

 private:
  void source(ValueId id, const std::string& name) {
    maker_[size_t(id)] = fmt::format("in{}", id);
    text_ += fmt::format("  in{} [label={}, shape=ellipse, fillcolor=white];\n", id,
                         in_quotes(fmt::format("%{} {}\n{}", id, name, type_of(g_[id]))));
  }

  std::string box(size_t k) {
    constexpr const char* colours[kNumPhases] = {"lightblue", "moccasin", "palegreen"};
    const Node& n = g_.nodes[k];
    const Fused* fused = as_fused(*n.prim);
    std::string label = fused ? fused->name : tessera::to_string(*n.prim);
    for (ValueId id : n.out) label += fmt::format("\n%{} {}", id, type_of(g_[id]));
    for (ValueId id : n.in) text_ += fmt::format("  {} -> n{};\n", maker_[size_t(id)], k);
    for (ValueId id : n.into)
      if (id != kNoValue)
        text_ +=
            fmt::format("  n{} -> {} [style=dashed, constraint=false];\n", k, maker_[size_t(id)]);
    for (ValueId id : n.out) maker_[size_t(id)] = fmt::format("n{}", k);
    return fmt::format("  n{} [label={}, fillcolor={}{}];\n", k, in_quotes(label),
                       colours[int(n.phase)], n.role == Role::kCollective ? ", peripheries=2" : "");
  }

  const Graph& g_;
  std::vector<std::string> maker_;  // by value: the box that it comes from
  std::string text_;                // inputs, outputs, edges
};

}  // namespace

std::string to_dot(const Graph& graph) { return Drawing(graph).text(); }

void draw_svg(const Graph& graph, const std::string& path) {
  const std::string source = path + ".dot";
  {
    std::ofstream file(source);
    file << to_dot(graph);
    TESSERA_CHECK(file.good(), "draw_svg: cannot write {}", source);
  }
  const char* arguments[] = {"dot", "-Tsvg", "-o", path.c_str(), source.c_str(), nullptr};
  pid_t child = 0;
  int error = posix_spawnp(&child, "dot", nullptr, nullptr, const_cast<char**>(arguments), environ);
  TESSERA_CHECK(error == 0,
                "draw_svg: Graphviz's dot is not to be run ({}); install graphviz, or draw {} "
                "elsewhere",
                std::strerror(error), source);
  int status = 0;
  waitpid(child, &status, 0);
  TESSERA_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0,
                "draw_svg: dot failed on {} (status {})", source, status);
  std::remove(source.c_str());
}

}  // namespace tessera::compiler
