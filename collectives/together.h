// Small calls that are made one after the other, as those of the parameters of a block, cost less
// together: NCCL then launches one kernel for all of them.
#pragma once
#include <vector>

#include "collectives/process_group.h"

namespace tessera {

/// While the outermost of these objects lives, asynchronous collectives of this thread on cards are
/// put off, and at its end they are submitted together, as one group of NCCL's. Those that the
/// thread waits for meanwhile, or that another call follows which is not put off, are submitted
/// then. NCCL demands equal groups of all ranks, so these make and wait for the same calls; no
/// other thread waits for a call before the scope ends.
class TogetherScope {
 public:
  TogetherScope();
  ~TogetherScope();
  TogetherScope(const TogetherScope&) = delete;
  TogetherScope& operator=(const TogetherScope&) = delete;
  /// That of the calling thread; null: there is none.
  static TogetherScope* current();
  /// Called by a group that puts `work` off.
  void add(Ref<Work> work) { works_.push_back(std::move(work)); }

 private:
  std::vector<Ref<Work>> works_;
};

}  // namespace tessera
