// Calls of a group that a thread has captured as part of a graph. All captured calls of a thread
// are on one stream, so that those of several communicators follow each other on every rank. Each
// launch of the graph makes them again: they get the numbers that they would have had one by one,
// so that ranks compare them, and the thread that watches sees one call that stands for all of
// them. Its deadline runs from when the card comes to the graph, whose kernels count. Invariant:
// the group's communicators outlive the graph, as NCCL demands.
#pragma once
#include <vector>

#include "collectives/nccl/core.h"
#include "core/backend/cuda/capture.h"

namespace tessera::nccl {

class CapturedCalls final : public cuda::GraphPart {
 public:
  explicit CapturedCalls(Ref<GroupCore> core);
  ~CapturedCalls() override;

  /// `memory` is kept as long as the graph lives.
  void add(const CardCall& call, std::vector<Ref<Storage>> memory);
  size_t count() const { return calls_.size(); }
  /// Throws what killed the group.
  void before_launch(const Stream& stream) override;
  void launched(const Stream& stream) override;

 private:
  struct Call {
    detail::PlanFacts facts;
    CallSite site;
  };
  const Ref<GroupCore> core_;
  Millis limit_{0};  // the longest of the calls
  std::vector<Call> calls_;
  std::vector<Ref<Storage>> memory_;
  Ref<Event> begun_;  // of the launch that is being made
};

}  // namespace tessera::nccl
