// Plans on disk, with the code that cuDNN compiled for them, so that other threads and processes
// with such a card, driver and library need not compile it. Invariant: a plan is taken only where
// its file is whole and says in full that it is of this graph and engine; whatever else lies there
// is made again.
#pragma once
#include <memory>
#include <string>

#include "core/backend/cuda/cudnn/graph.h"

namespace tessera::cuda {

/// The plans of one graph on a card. Where the disk cannot be used, the log says so once, and each
/// process compiles its own.
class KeptPlans {
 public:
  /// `graph` is what the key of its engine is made of: the card, driver and library too.
  explicit KeptPlans(std::string graph) : graph_(std::move(graph)) {}
  /// The plan of `graph` by `engine`; null where none is kept, or the library does not take it,
  /// which the log says.
  std::unique_ptr<dnn::ExecutionPlan> find(const dnn::Graph& graph, dnn::Handle handle,
                                           const dnn::Engine& engine) const;
  /// Keeps the plan, unless the library makes it as fast from the graph, in place of what is kept.
  void keep(const dnn::ExecutionPlan& plan) const;

 private:
  std::string head_of(const dnn::Engine& engine) const;
  std::string graph_;
};

}  // namespace tessera::cuda
