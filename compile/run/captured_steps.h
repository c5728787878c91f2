// Runs ranges of a program's steps as graphs of their device, one launch each. The first run goes
// step by step, since kernels are loaded then and groups choose who moves their tensors; the second
// one captures. Collectives that are captured run on a stream of their group's: they begin behind
// the steps before them, and end before the first step that needs them. Copies from and to pinned
// memory of the host are on the range's stream. A graph knows addresses. So
// an input or output that lies elsewhere at each run gets memory of its own: inputs are copied into
// it before the run, outputs out of it behind. Where other memory moved, the ranges are captured
// anew. A graph belongs to the thread and the stream that captured it. Ranks whose ranges have
// collectives capture and launch in the same runs (step_ranks.h).
// Internal: not part of the public interface.
#pragma once
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "compile/run/step_ranks.h"
#include "compile/run/stream_choice.h"
#include "core/tensor/device_runtime.h"

namespace tessera::compiler {

class CapturedSteps {
 public:
  /// `tunes`: ranges may run on several streams, where that was faster (stream_choice.h).
  explicit CapturedSteps(bool tunes) : tunes_(tunes) {}
  /// Whether runs of `program` launch graphs, or will.
  bool captures(const Program& program) const { return !program.ranges.empty() && !gave_up_; }
  /// What the next run of `program`, whose memories are bound, would be on this rank alone.
  /// `step_by_step`: it captures nothing and launches no graph, except where graphs have
  /// collectives, which ranks launch together.
  RunState look(Program& program, bool step_by_step);
  /// Begins the run. `agreed`: what look() returned, or what ranks made of it. Throws nothing but
  /// what waits for inputs throw.
  void begin_run(Program& program, const RunState& agreed);
  /// Runs range `r` by its graph; false where its steps are to be run one by one. Throws UserError
  /// where an earlier launch refused an operand.
  bool run(Program& program, size_t r);
  /// Copies outputs to the memory that they were bound to when the run began, and binds all there.
  void end_run(Program& program);
  /// Forgets graphs and addresses: the program is new, or its memory was released.
  void reset();
  /// How many graphs the last run launched; 0 where it went step by step.
  int launches() const { return launches_; }

 private:
  // An input or output that steps of ranges use.
  struct Place {
    MemoryId memory;
    Device device;
    bool movable;  // it may have memory of its own
    bool moves;    // it is taken to lie elsewhere at each run
    Range reach;   // elements
    size_t element_bytes = 0;
    const void* address = nullptr;  // in the last run, without memory of its own
    Ref<Storage> own = {};          // used on one stream alone, so that nothing waits for it
    Ref<Storage> given = {};
    int64_t given_base = 0;
  };
  bool look_at_places(Program& program);
  void find_places(const Program& program);
  bool find_moved(const Program& program);
  void stand_in(Program& program, Place& place);
  void enqueue(const Program& program, const StepRange& range, const StepStreams& streams);
  bool launch(Program& program, size_t r);
  bool capture(const Program& program, const StepRange& range, const StepStreams& streams,
               Ref<DeviceGraph>& graph);
  void fail(const std::string& why);

  // What a range of steps has been captured as.
  struct Graphs {
    Ref<DeviceGraph> one, several;  // by the streams that its steps are on
    std::optional<StreamChoice> choice = {};
    Stream stream = {};  // where they are launched
  };
  const bool tunes_;
  std::vector<Place> places_;
  std::vector<Graphs> graphs_;  // by range
  std::thread::id thread_;      // that captures
  bool found_ = false, graphs_run_ = false;
  bool looked_ = false, moved_ = false;  // by look(): places, and they are elsewhere
  bool failed_ = false;   // this rank cannot go on, and the others have not heard of it
  bool gave_up_ = false;  // no graphs any more
  int runs_ = 0, moves_ = 0, launches_ = 0;
};

}  // namespace tessera::compiler
