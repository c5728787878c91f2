// The program that an executor runs: a graph as a flat list of kernel calls. Values that are never
// alive together share memory. Everything that can be decided before the first run is decided here:
// kernels, layouts, dense copies, scratch, which result is written over which operand, and when to
// wait for something pending. Invariant: run in order, the steps compute what interpret() computes.
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

/// A block of bytes that values occupy, one after the other or as views of each other. Its storage
/// has no data before the executor binds it.
struct Memory {
  enum class Kind : uint8_t {
    kArena,     // within a run
    kOutput,    // of the graph: storage of its own
    kInput,     // explicit input `index`
    kImplicit,  // implicit input `index`
    kNumber,    // copy of a number of the host on a device, in block `index`
  };
  /// A handle on the memory. All are bound together when its storage changes.
  struct View {
    Tensor tensor;
    int64_t offset = 0;  // elements behind the first one of the memory or of the input
  };
  Kind kind = Kind::kArena;
  int index = 0;
  size_t bytes = 0;         // not set for an input, which brings its own
  int arena = 0;            // kArena: index into Program::arenas
  size_t offset = 0;        // kArena, kNumber: into that arena or block
  int first = 0, last = 0;  // steps between which it is in use, both included
  bool written = false;     // for inputs: an effect writes it
  Ref<Storage> storage;
  std::vector<View> views = {};
};

/// Memory that values of kind kArena use in turn.
struct Arena {
  Ref<ProcessGroup> group;  // the group in whose own memory it lies; null: that of `device`
  Device device = {};
  Device beside = {};  // a card: it is pinned memory of the host, to which that copies
  size_t bytes = 0;
  bool differs = false;  // ranks lay it differently, so that it is ordinary memory all the same
};

/// One kernel call, on the calling thread's stream of `device`.
struct Step {
  Device device = {};
  const Primitive* prim = nullptr;
  const Kernel* kernel = nullptr;  // null: the eager backend runs the op's decomposition
  std::span<const Tensor> in = {}, out = {};
  // Memories that may be pending, to wait for before the step.
  std::span<const MemoryId> waits = {};
  std::span<const MemoryId> bumps = {};  // inputs whose version the step raises, as assign_ does
  Workspace workspace = {};              // its state is kept alive by `state`
  Ref<const RefCounted> state = {};      // what the kernel's plan found out
  MemoryId scratch = kNoMemory;          // where the workspace lies
  int32_t node = 0;
  bool collective = false;
  bool uncapturable = false;  // Kernel's or Plan's
  bool moves = false;         // a copy between the host and a device that captures
};

/// Neighbouring steps of one device that only enqueue, so that they can be captured as one graph.
struct StepRange {
  Device device;
  int begin = 0, end = 0;    // steps [begin, end)
  bool collectives = false;  // some of them are
  struct Touched {
    MemoryId memory;
    bool written;
  };
  std::vector<Touched> touched = {};  // memories that the steps read or write, but kNumber's
  std::vector<MemoryId> bumps = {};   // of all steps, one behind the other
};

/// Numbers and keys of the host that steps of a device read: copies of them lie side by side in a
/// block of its memory, so that steps that are captured see new values at each run.
struct NumberCopies {
  struct Number {
    Tensor from;    // on the host
    size_t offset;  // in the block
  };
  int before = 0;  // the step before which they are copied
  int block = 0;
  size_t begin = 0, bytes = 0;  // the part of the block
  std::vector<Number> numbers = {};
};

struct Program {
  std::vector<Memory> memories;
  std::vector<Step> steps;
  std::vector<Tensor> outputs;       // handles on the memories of outputs
  std::vector<MemoryId> results;     // of collectives: pending until they are done
  std::vector<MemoryId> unfinished;  // those that no step waits for
  // The first arena is ordinary memory of the host. The others are memory of devices, and memory of
  // groups that have their own there, for what their collectives reduce or send in place (on a
  // device, for what they write too), as large as that needs.
  std::vector<Arena> arenas;
  CallSite site;  // of what ranks decide together on the host, in errors
  // Other ranks may be running programs of other sizes: collectives are in no range, and nothing
  // lies where it does on other ranks.
  bool alone = false;
  std::vector<StepRange> ranges;  // in order; found after the first run (step_ranges.h)
  bool ranges_found = false;
  std::vector<NumberCopies> copies;  // by `before`
  struct NumberBlock {
    Device device;
    size_t bytes = 0;
  };
  std::vector<NumberBlock> blocks;
  PlanSettings settings;       // settings that kernels were planned under and must run under
  size_t unplanned_bytes = 0;  // of all results, had each its own memory
  int eager_steps = 0;         // steps without a kernel
  std::vector<std::unique_ptr<Tensor[]>> operands;  // what Step::in and out point to
  std::vector<std::unique_ptr<MemoryId[]>> lists;   // what Step::waits and bumps point to
  std::vector<PrimRef> transfers;                   // ops of steps that no node stands for

  /// The bytes of all arenas.
  size_t arena_bytes() const;
};

/// Lets all handles on a memory see `storage`; its first element is number `base` there.
void bind(Memory& m, const Ref<Storage>& storage, int64_t base);
/// The range of elements that the handles of an input touch, counted from its first one.
Range reach_of(const Memory& input);
/// Makes the program of `graph` under the settings of the calling thread. Throws what infer and the
/// plans of kernels throw.
Program make_program(const Graph& graph);

}  // namespace tessera::compiler
