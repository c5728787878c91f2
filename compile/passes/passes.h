// Passes: each takes a verified graph to a verified graph that computes the same. Each is one file,
// can be left out, and says nothing about the others but what order pipeline() puts them in.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "compile/graph.h"

namespace tessera::compile {

/// Replaces ops that have a decomposition and gain from fusion (softmax, norms, losses, their
/// derivatives, dropout, optimizer steps over lists, global norm) by the ops they are made of. What
/// stays is the closed set that README.md lists.
void decompose(Graph& graph);
/// One node for equal ops on equal operands. Effects, collectives and random draws stay.
void eliminate_common_subexpressions(Graph& graph);
/// Removes what no output and no effect needs. Collectives stay: the others wait in them.
void eliminate_dead_code(Graph& graph);
/// Ops on constants become constants; x * 1, x + 0 and casts to the same dtype vanish.
void fold_constants(Graph& graph);
/// Copies of memory that nobody writes, and chains of views, become one view or none.
void clean_views(Graph& graph);
/// Groups of pointwise ops, reductions and views between them become Fused ops; effects that end in
/// such a group become its results.
void fuse(Graph& graph);

struct Pass {
  std::string_view name;  // "cse": what TESSERA_COMPILE_SKIP=cse,fuse leaves out
  void (*run)(Graph&);
};
/// In the order in which they run.
const std::vector<Pass>& pipeline();
/// Runs the passes of pipeline() but those named in `skip` (separated by commas; UserError for an
/// unknown name), verifying after each.
void run_passes(Graph& graph, std::string_view skip = "");

}  // namespace tessera::compile
