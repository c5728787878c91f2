// Calls of a group that a thread has captured as part of a graph. Each launch of the graph makes
// them again: they get the numbers that they would have had one by one, so that ranks compare them
// and a peer may make its own without a graph, and the thread that watches sees one call that
// stands for all of them. Its deadline runs from when the card comes to the graph, whose kernels
// count. Invariant: the group's communicators outlive the graph, as NCCL demands.
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
  Ref<CardCall> launch_;  // the one that is being made
  Ref<Event> begun_;
};

}  // namespace tessera::nccl
