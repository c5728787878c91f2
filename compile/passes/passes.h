// The passes. Each turns a verified graph into a verified graph that computes the same. Each is one
// file, can be left out, and depends on the others only through its place in pipeline().
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "compile/ir/graph.h"
#include "compile/ir/pass.h"
#include "core/base/boundaries.h"

namespace tessera::compiler {

/// The kinds of ops that decompose() replaces where a neighbour can be fused with them. Optimizers
/// are replaced also alone, if their state fits into the CPU's caches; for larger state, and on
/// devices, the one kernel for the whole list is as fast.
struct DecomposeOptions {
  bool norms = true;       // layer_norm, rms_norm and their derivatives
  bool softmax = true;     // softmax, log_softmax and their derivatives
  bool optimizers = true;  // adam and sgd over lists that write at most kCachedElements
  // The least elements that a list writes of each tensor, on average, to be worth a kernel for
  // each. Lists of biases are not: making and calling their kernels takes longer than they save.
  int64_t least_elements = 4096;
};
inline constexpr int64_t kCachedElements = limit("decompose.cached");
/// Replaces ops that gain from fusion by the ops they are made of, from the closed set
/// (closed_set.h). Results differ from those of the eager kernels only by the order of sums. The
/// overload without options also respects the graph's mode: in a deterministic graph it replaces
/// only optimizers, whose results do not differ.
void decompose(Graph& graph, const DecomposeOptions& options);
void decompose(Graph& graph);
/// Makes one node of equal ops on equal operands. Effects, collectives and random draws stay.
void eliminate_common_subexpressions(Graph& graph);
/// Removes what no output and no effect needs. Collectives stay, since the other ranks take part in
/// them.
void eliminate_dead_code(Graph& graph);
/// Evaluates ops on constants, and removes x * 1, x + 0 (for integers) and casts to the same dtype.
void fold_constants(Graph& graph);
/// Removes copies of memory that is never written, and makes one view or none of a chain of views.
void clean_views(Graph& graph);
/// Adds the gradient of an embedding, zero but in the rows that were looked up, to another tensor
/// row by row. Sums keep their order, but a -0 of that tensor stays in rows that were not looked
/// up, so a deterministic graph is left as it is.
void accumulate(Graph& graph);
/// The op that accumulate() makes, for a table of `rows`.
PrimRef add_embedding_grad_op(int64_t rows, int64_t padding_idx);
/// Makes one op of a product and the bias that is added to it, on devices that add one for nothing
/// (DeviceRuntime::has_epilogues). It is then added before the product is rounded to 16 bits, so a
/// deterministic graph is left as it is.
void join_bias(Graph& graph);
/// Lets a convolution of 16-bit floats give the moments of its result to the batch-norm behind it,
/// on devices with a kernel for that. Sums are in another order, so a deterministic graph is left
/// as it is.
void join_stats(Graph& graph);
/// Makes one op of a convolution and the batch-norm by running moments behind it, with its residual
/// and relu, on devices with a kernel for that. The result is rounded once, so a deterministic
/// graph is left as it is.
void join_norms(Graph& graph);
/// Lets the gradient of a convolution's input, of 16-bit floats, mask by the relu and sum what the
/// derivative of the batch-norm in front of it takes, together with another gradient that is added,
/// on devices with a kernel for that. Places of roundings and orders of sums change, so a
/// deterministic graph is left as it is.
void join_norm_grads(Graph& graph);
/// Makes one op of a product and what such devices compute beside it for nothing: GELU of its
/// result, the gradient of GELU, sums of a result or an operand, which are gradients of biases, and
/// the cast to f32 and the accumulation of a weight's gradient.
/// Places of roundings and orders of sums change, so a deterministic graph is left as it is.
void join_epilogues(Graph& graph);
/// Makes Fused ops of groups of pointwise ops, reductions and the views between them; effects at
/// the end of such a group become its results. Reductions of a deterministic graph stay as they
/// are.
void fuse(Graph& graph);
/// Lets collectives begin early enough, by an estimate of times, to be done when their results are
/// read: computation that they do not need is moved behind them. Values do not change.
void overlap_collectives(Graph& graph);

/// The passes in the order in which they run.
const std::vector<Pass>& pipeline();
/// Throws UserError for a name in `skip` (separated by commas) that no pass of pipeline() or of
/// `passes` has.
void check_passes(std::string_view skip, std::span<const Pass> passes = {});
/// Runs the passes of pipeline(), or `passes` if given, except those named in `skip` (throws
/// UserError for an unknown name), and verifies the graph after each. Throws BugError that names
/// the pass if one throws.
void run_passes(Graph& graph, std::string_view skip = "", std::span<const Pass> passes = {});

}  // namespace tessera::compiler
