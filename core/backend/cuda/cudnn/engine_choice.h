// Which engine computes a graph: the fastest of the library's suggestions, timed at the first use
// and kept on disk with its plan, so that other threads and processes with such a card and library
// need neither time engines nor compile the plan. In deterministic mode it is the first suggestion,
// so that no time decides about bits.
#pragma once
#include "core/backend/cuda/cudnn/plans.h"

namespace tessera::cuda {

struct ChosenPlan {
  std::unique_ptr<dnn::ExecutionPlan> plan =
      nullptr;           // null: none, and `why` says why; or our own kernel
  bool own = false;      // which is faster
  bool for_good = true;  // false: another use of the graph may choose better
  bool kept = false;     // the plan is from disk
};

/// Where a plan may come from: kGraph where the one from disk has failed, which is then replaced.
enum class PlanFrom { kDisk, kGraph };

/// `run` enqueues the graph by a plan, and says whether it could; results of all but the last call
/// are overwritten. May wait for the stream, but in a capture.
ChosenPlan choose_plan(const CudnnFunctions& f, const WantedGraph& wanted, PlanFrom from,
                       dnn::Handle handle, const Stream& stream,
                       FunctionRef<bool(const dnn::ExecutionPlan&)> run, std::string& why);

}  // namespace tessera::cuda
