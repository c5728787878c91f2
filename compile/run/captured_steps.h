// Runs ranges of a program's steps as graphs of their device, one launch each. The first run goes
// step by step, since kernels are loaded then; the second one captures. A graph knows addresses, so
// what lies elsewhere at each run gets a place of its own, from which outputs and to which inputs
// are copied; where other memory moved, the ranges are captured anew.
// Internal: not part of the public interface.
#pragma once
#include <string>
#include <vector>

#include "compile/run/program.h"
#include "core/tensor/device_runtime.h"

namespace tessera::compiler {

class CapturedSteps {
 public:
  /// Begins a run of `program`, whose memories are bound. `step_by_step`: it captures nothing and
  /// launches no graph.
  void begin_run(Program& program, bool step_by_step);
  /// Runs range number `r` by its graph; false where its steps are to be run one by one.
  bool run(Program& program, size_t r);
  /// Copies outputs to the memory that they were bound to when the run began, and binds them there.
  void end_run(Program& program);
  /// Forgets everything: the program is new, or its memory was released.
  void reset();
  /// How many graphs the last run launched; 0 where it went step by step.
  int launches() const { return launches_; }

 private:
  // An input or output that steps of ranges use.
  struct Place {
    MemoryId memory;
    Device device;
    bool movable;  // it may have a place of its own
    Range reach;   // elements
    size_t element = 0;
    const void* address = nullptr;  // where it was in the last run, without a place of its own
    Ref<Storage> own = {}, given = {};
    int64_t given_base = 0;
  };
  void find_places(const Program& program);
  void stand_in(Program& program, Place& place, const Stream& stream);
  Ref<DeviceGraph> captured(const Program& program, const StepRange& range);
  void give_up(const std::string& why);

  std::vector<Place> places_;
  std::vector<Ref<DeviceGraph>> graphs_;  // by range
  std::vector<Stream> streams_;           // by range: where the graph is launched
  bool found_ = false, graphs_run_ = false, gave_up_ = false;
  int runs_ = 0, moves_ = 0, launches_ = 0;
};

}  // namespace tessera::compiler
