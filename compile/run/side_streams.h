// Which steps of a range run beside each other: steps that use no memory in common may be on
// different streams of the device. The order of the program is kept on each stream, and a stream
// follows another one where a step needs, overwrites or is overwritten by what runs there.
// Internal: not part of the public interface.
#pragma once
#include <cstdint>
#include <vector>

#include "compile/run/program.h"
#include "core/base/function_ref.h"

namespace tessera::compiler {

/// The streams of the steps of a range.
struct StepStreams {
  struct Place {
    uint8_t stream = 0;   // 0: the thread's compute stream; others: side_stream() of the device
    uint8_t follows = 0;  // a bit for each stream that this one follows before the step
  };
  std::vector<Place> places;  // by step of the range; empty: all are on the compute stream
  int count = 1;              // streams that are used
};

/// Spreads the steps of a range over up to three streams. A step goes where the latest step that it
/// depends on was the last one, or else where nothing has been for the longest time. Steps that
/// begin or wait for a collective stay on the compute stream.
StepStreams spread(const Program& p, const StepRange& range);

/// Calls `run(i)` for the steps of the range, in order, with their streams as the thread's compute
/// stream. All streams have been joined when it returns. `run` lets no stream but the compute
/// stream wait.
void run_on(const StepStreams& streams, const StepRange& range, FunctionRef<void(int)> run);

}  // namespace tessera::compiler
