// What an executor runs: a graph as a flat list of kernel calls on memories that are shared by
// values that are never alive together. Everything that can be decided before the first run is
// decided here: kernels, layouts, dense copies, scratch, which result is written over which
// operand, when something that may be pending is waited for. Invariant: run in order, the steps
// compute what interpret() computes.
#pragma once
#include <memory>
#include <vector>

#include "collectives/process_group.h"
#include "compile/ir/graph.h"
#include "compile/run/memory_plan.h"
#include "core/dispatch/kernel.h"

namespace tessera::compiler {

/// Index into Program::memories.
using MemoryId = int32_t;
inline constexpr MemoryId kNoMemory = -1;

/// Bytes that values live in, one after the other or as views of each other. Its storage has no
/// data before the executor binds it.
struct Memory {
  enum class Kind : uint8_t {
    kArena,     // within a run
    kOutput,    // of the graph: storage of its own
    kInput,     // explicit input `index`
    kImplicit,  // implicit input `index`
  };
  /// A handle that sees it. All are bound together when its storage changes.
  struct View {
    Tensor tensor;
    int64_t offset = 0;  // elements behind the first one of the memory or of the input
  };
  Kind kind = Kind::kArena;
  int index = 0;
  size_t bytes = 0;         // but of an input, which brings its own
  int arena = 0;            // kArena: index into Program::arenas
  size_t offset = 0;        // kArena: into that arena
  int first = 0, last = 0;  // steps between which it is in use, both included
  bool written = false;     // by an effect; of inputs
  Ref<Storage> storage;
  std::vector<View> views = {};
};

/// Memory that values of kind kArena take turns in.
struct Arena {
  Ref<ProcessGroup> group;  // whose own memory it is; null: ordinary memory
  size_t bytes = 0;
};

/// One kernel call.
struct Step {
  const Primitive* prim = nullptr;
  const Kernel* kernel = nullptr;  // null: the eager backend runs the op's decomposition
  std::span<const Tensor> in = {}, out = {};
  std::span<const MemoryId> waits = {};  // that may be pending, and are waited for before
  std::span<const MemoryId> bumps = {};  // inputs whose version moves, as assign_ moves it
  Workspace workspace = {};              // its state is kept alive by `state`
  Ref<const RefCounted> state = {};      // what the kernel's plan found out
  MemoryId scratch = kNoMemory;          // where the workspace lies
  int32_t node = 0;
  bool collective = false;
};

struct Program {
  std::vector<Memory> memories;
  std::vector<Step> steps;
  std::vector<Tensor> outputs;       // handles of the memories they are in
  std::vector<MemoryId> results;     // of collectives: pending while one is under way
  std::vector<MemoryId> unfinished;  // those that no step waits for
  // The first is of ordinary memory. The others are of groups with memory of their own, for what
  // their collectives reduce or send where it lies, and as large as that needs.
  std::vector<Arena> arenas;
  PlanSettings settings;       // that kernels were planned under, and are to be run under
  size_t unplanned_bytes = 0;  // of all results, had each its own memory
  int eager_steps = 0;         // without a kernel
  std::vector<std::unique_ptr<Tensor[]>> operands;  // what Step::in and out point to
  std::vector<std::unique_ptr<MemoryId[]>> lists;   // what Step::waits and bumps point to

  /// Of all arenas.
  size_t arena_bytes() const;
};

/// Under the settings of the calling thread. Throws what infer and the plans of kernels throw.
Program make_program(const Graph& graph);

}  // namespace tessera::compiler
