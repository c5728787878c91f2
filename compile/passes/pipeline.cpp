#include <algorithm>

#include "compile/passes/passes.h"
#include "compile/verify.h"

namespace tessera::compiler {

const std::vector<Pass>& pipeline() {
  static const std::vector<Pass> passes = {
      {"views", clean_views},
      {"constants", fold_constants},
      {"cse", eliminate_common_subexpressions},
      {"decompose", decompose},
      {"constants", fold_constants},
      {"cse", eliminate_common_subexpressions},
      {"dce", eliminate_dead_code},
      {"accumulate", accumulate},
      {"fuse", fuse},
      {"overlap", overlap_collectives},
  };
  return passes;
}

void run_passes(Graph& graph, std::string_view skip) {
  auto named = [](std::string_view name) {
    return std::ranges::any_of(pipeline(), [&](const Pass& p) { return p.name == name; });
  };
  std::vector<std::string_view> left_out;
  while (!skip.empty()) {
    std::string_view name = skip.substr(0, skip.find(','));
    skip.remove_prefix(std::min(skip.size(), name.size() + 1));
    std::string names;
    for (const Pass& p : pipeline())
      if (names.find(p.name) == std::string::npos)
        names += (names.empty() ? "" : ", ") + std::string(p.name);
    TESSERA_CHECK(named(name), "passes: there is no pass {} to leave out; there are {}", name,
                  names);
    left_out.push_back(name);
  }
  for (const Pass& p : pipeline()) {
    if (std::ranges::count(left_out, p.name)) continue;
    p.run(graph);
    verify(graph);
  }
}

}  // namespace tessera::compiler
