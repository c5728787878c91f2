// When the calls of a run happened: recording them, what of the communication was hidden behind
// computation, and the run as a Chrome trace with one lane for kernels and one for each group.
#pragma once
#include <chrono>
#include <string>
#include <vector>

#include "compile/executor.h"

namespace tessera::compiler {

/// Writes the records of one run: begin, waited, end for each call, in order; submitted after a
/// collective's.
class TimelineRecorder {
 public:
  explicit TimelineRecorder(std::vector<CallRecord>& calls);
  void begin() { begin_ = now(); }
  void waited() { waited_ = now(); }
  void end(const Primitive* prim, int32_t node);
  /// The collective of the last call is on its way as `work`; null: it is done.
  void submitted(const Ref<Event>& work);
  /// Waits for what is under way and writes the lanes of the groups.
  void finish();

 private:
  struct Submitted {
    size_t call;
    std::string group;
    Ref<Event> work;
  };
  double now() const {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start_)
        .count();
  }

  std::vector<CallRecord>& calls_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double begin_ = 0, waited_ = 0;
  const Primitive* last_ = nullptr;
  std::vector<Submitted> collectives_;
};

/// What communication cost a recorded run.
struct Overlap {
  double run_us = 0;         // from the first call to the end of the last
  double collective_us = 0;  // of execution, summed over groups
  double exposed_us = 0;     // that the thread spent waiting for it
  /// Share of the communication that took place behind computation; 1 where there is none.
  double hidden() const;
};
Overlap overlap_of(const std::vector<CallRecord>& calls);

/// The run as JSON for chrome://tracing and Perfetto: process `rank`, a lane for kernels and one
/// for each group, the node of the graph with each call.
std::string chrome_trace(const Graph& graph, const std::vector<CallRecord>& calls, int rank = 0);

/// What a run does, in lines for people: kernels, bytes, communication and (with `calls`) how much
/// of it is hidden, memory.
std::string report(const Executor& executor, const std::vector<CallRecord>& calls = {});

}  // namespace tessera::compiler
