// Runs a graph again and again: memory is planned once, nothing is dispatched or allocated.
// Invariants: a run computes what interpret() computes; between two runs the executor keeps only
// the arena, what it was given, and on a device that captures what its graphs use: memory of
// kernels, and places for inputs and outputs that lie elsewhere at each run.
// Internal: not part of the public interface.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "compile/ir/graph.h"

namespace tessera::compiler {

/// Counts what one run moves.
struct Traffic {
  int kernels = 0, collectives = 0;  // calls
  size_t kernel_bytes = 0;           // read and written by kernels, each operand and result once
  size_t collective_bytes = 0;       // of operands or results, whichever are more
};

/// The memory of a run. Scratch that kernels allocate themselves (products of matrices: up to three
/// quarters of the L2 cache for each thread) is not included.
struct MemoryPlan {
  size_t arena_bytes = 0;      // intermediate values and scratch, together at their peak, in memory
                               // of process groups too
  size_t output_bytes = 0;     // new at each run, unless the program dropped the last ones
  size_t implicit_bytes = 0;   // parameters and other state, read and written where they are
  size_t unplanned_bytes = 0;  // sum over all values, had each its own memory
  int eager_nodes = 0;  // ops without a kernel: their decomposition runs eagerly, and allocates
};

/// Arenas that several executors of one thread use in turn, as large as the largest of them needs.
/// They stay where they are while they are large enough, so that graphs of devices can be launched
/// in turn.
class SharedArena;
std::shared_ptr<SharedArena> make_shared_arena();
class StepRanks;

struct ExecutorOptions {
  // An arena shared with other executors, whose ranks may have other sizes: before one of them
  // runs, this one releases all its memory, unless it launches graphs of a device and is one of the
  // eight that ran last. Null: it has its own.
  std::shared_ptr<SharedArena> arena = nullptr;
  // Whether steps that a device captures may run beside each other on streams of it, where that was
  // measured to be faster.
  bool tunes = false;
  // What ranks agree on in all graphs of a function (step_ranks.h). Null: in this one alone.
  std::shared_ptr<StepRanks> ranks = nullptr;
};

class Executor {
 public:
  /// Plans `graph`, which must be verified and whose nodes may be reordered (memory_order.h).
  /// Memory is allocated at the first run. A run with another number of threads or another
  /// deterministic mode than the last one plans the steps anew.
  explicit Executor(Graph graph, const ExecutorOptions& options = {});
  ~Executor();
  Executor(Executor&&) noexcept;

  /// Runs the graph on explicit `inputs`, which must have the layouts it was traced with, and on
  /// its implicit inputs where they are. `implicit`, when not empty, replaces these: one tensor for
  /// each, with equal layouts. Outputs are new tensors, but memory of outputs of an earlier run is
  /// used again when the program no longer holds it. Each kernel is an event of the thread's
  /// profile, if there is one, with its node as detail. Throws ShapeError for inputs that do not
  /// fit, and what kernels throw.
  Tensors run(std::span<const Tensor> inputs, std::span<const Tensor> implicit = {});

  const Graph& graph() const;
  const MemoryPlan& memory() const;
  const Traffic& traffic() const;
  /// How many graphs of devices the last run launched. Where a device captures
  /// (DeviceRuntime::capture), the first run on it launches kernels one by one, and so does each
  /// one under a profile where no graph has collectives; the others launch a graph for each stretch
  /// of steps between work of the host: collectives that pass through it, copies to memory that is
  /// not pinned, ops that wait.
  int device_graphs() const;

 private:
  friend class SharedArena;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::compiler
