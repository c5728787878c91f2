#include <fmt/ranges.h>

#include <algorithm>

#include "compile/ir/verify.h"
#include "compile/passes/passes.h"

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
      {"bias", join_bias},
      {"stats", join_stats},
      {"norms", join_norms},
      {"norm_grads", join_norm_grads},
      {"epilogues", join_epilogues},
      {"fuse", fuse},
      {"overlap", overlap_collectives},
  };
  return passes;
}

namespace {

std::vector<std::string_view> names_in(std::string_view list) {
  std::vector<std::string_view> names;
  while (!list.empty()) {
    names.push_back(list.substr(0, list.find(',')));
    list.remove_prefix(std::min(list.size(), names.back().size() + 1));
  }
  return names;
}

}  // namespace

void check_passes(std::string_view skip, std::span<const Pass> passes) {
  std::vector<std::string_view> known;
  for (std::span<const Pass> list : {passes, std::span<const Pass>(pipeline())})
    for (const Pass& p : list)
      if (std::ranges::find(known, p.name) == known.end()) known.push_back(p.name);
  for (std::string_view name : names_in(skip))
    TESSERA_CHECK(std::ranges::find(known, name) != known.end(),
                  "passes: there is no pass {} to leave out; there are {}", name,
                  fmt::join(known, ", "));
}

void run_passes(Graph& graph, std::string_view skip, std::span<const Pass> passes) {
  check_passes(skip, passes);
  const std::vector<std::string_view> left_out = names_in(skip);
  for (const Pass& p : passes.empty() ? std::span<const Pass>(pipeline()) : passes) {
    if (std::ranges::count(left_out, p.name)) continue;
    try {
      p.run(graph);
      verify(graph);
    } catch (const std::exception& e) {
      throw BugError(fmt::format("pass {}: {}", p.name, e.what()));
    }
  }
}

}  // namespace tessera::compiler
