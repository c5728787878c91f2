// Passes: each takes a verified graph to a verified graph that computes the same. Each is one file,
// can be left out, and says nothing about the others but what order pipeline() puts them in.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "compile/ir/graph.h"
#include "compile/ir/pass.h"
#include "core/base/boundaries.h"

namespace tessera::compiler {

/// Families of ops that decompose() takes apart where a neighbour can join them, optimizers also
/// alone, where their state may stay in caches: beyond, the list's one kernel is as fast.
struct DecomposeOptions {
  bool norms = true;       // layer_norm, rms_norm and their derivatives
  bool softmax = true;     // softmax, log_softmax and their derivatives
  bool optimizers = true;  // adam and sgd over lists that write at most kCachedElements
  // What a list writes of each tensor, on average, to be worth a kernel for each. Biases are not:
  // their kernels take longer to make and to call than they save.
  int64_t least_elements = 4096;
};
inline constexpr int64_t kCachedElements = limit("decompose.cached");
/// Replaces ops that gain from fusion by the ops they are made of, from the closed set that
/// README.md lists. Results differ from the eager kernels' by the order of sums alone; without
/// options, only optimizers in a deterministic graph, whose results do not differ.
void decompose(Graph& graph, const DecomposeOptions& options);
void decompose(Graph& graph);
/// One node for equal ops on equal operands. Effects, collectives and random draws stay.
void eliminate_common_subexpressions(Graph& graph);
/// Removes what no output and no effect needs. Collectives stay: the others wait in them.
void eliminate_dead_code(Graph& graph);
/// Ops on constants become constants; x * 1, x + 0 and casts to the same dtype vanish.
void fold_constants(Graph& graph);
/// Copies of memory that nobody writes, and chains of views, become one view or none.
void clean_views(Graph& graph);
/// The gradient of an embedding, zero but in the rows that were looked up, is added to another
/// tensor row by row. Sums keep their order; a -0 of that tensor stays in rows not looked up,
/// so a deterministic graph is left as it is.
void accumulate(Graph& graph);
/// The op that accumulate() makes, for a table of `rows`.
PrimRef add_embedding_grad_op(int64_t rows, int64_t padding_idx);
/// Groups of pointwise ops, reductions and views between them become Fused ops; effects that end in
/// such a group become its results. Reductions of a deterministic graph stay as they are.
void fuse(Graph& graph);
/// Collectives begin early enough, by an estimate of times, to be done when their results are read:
/// what they do not need is computed behind them. Changes no value.
void overlap_collectives(Graph& graph);

/// In the order in which they run.
const std::vector<Pass>& pipeline();
/// Throws UserError for a name in `skip` (separated by commas) that no pass of pipeline() nor of
/// `passes` has.
void check_passes(std::string_view skip, std::span<const Pass> passes = {});
/// Runs the passes of pipeline(), or those given instead, but those named in `skip` (UserError for
/// an unknown name), verifying after each. Throws BugError naming a pass that throws.
void run_passes(Graph& graph, std::string_view skip = "", std::span<const Pass> passes = {});

}  // namespace tessera::compiler
