// Plans in use: a thread keeps its own for each graph and card, since cuDNN does not say that two
// threads may execute one. Invariant: a graph that cuDNN refuses is left to the caller's own
// kernels, and the log says so once.
#pragma once
#include "core/backend/cuda/cudnn/graphs.h"
#include "core/base/function_ref.h"
#include "core/tensor/stream.h"

namespace tessera::cuda {

/// While one lives, Tessera's own kernels compute what graphs do for the calling thread: for tests
/// and measurements that compare the two.
class OwnGraphs {
 public:
  OwnGraphs();
  ~OwnGraphs();
  OwnGraphs(const OwnGraphs&) = delete;
  OwnGraphs& operator=(const OwnGraphs&) = delete;

 private:
  bool before_;
};

/// cuDNN, where the calling thread may ask it for graphs; else null, and the log has said why.
const CudnnFunctions* graphs_in_use();

/// A graph that somebody wants computed: `problem` tells it from all others, `make` builds it, and
/// `describe` names it to users.
struct WantedGraph {
  std::string_view problem;
  dnn::Demands demands;
  FunctionRef<dnn::Graph(const CudnnFunctions&)> make;
  FunctionRef<std::string()> describe;
  /// Null, or enqueues the same without this graph, which may be faster: `run_graph` returns false
  /// then.
  const FunctionRef<void()>* own = nullptr;
};
/// Enqueues the graph on `stream`; `bind` says where its values are. False where nothing was
/// enqueued, or what was is to be overwritten: cuDNN is not in use, or does not compute this;
/// `bind` is then not called, but for a graph that fails at its first execution.
bool run_graph(const WantedGraph& graph, FunctionRef<std::vector<dnn::Binding>()> bind,
               const Stream& stream);

}  // namespace tessera::cuda
