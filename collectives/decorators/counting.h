// Counts calls and bytes by kind, for reports and for tests of how much a wrapper communicates.
// Calls on sub-groups are counted with those of the group they were split from.
#pragma once
#include <array>
#include <atomic>

#include "collectives/decorators/decorator.h"

namespace tessera {

struct CollectiveCounts {
  struct PerKind {
    std::atomic<int64_t> calls{0};
    std::atomic<int64_t> bytes{0};  // of this rank's inputs, or of its outputs where it has none
  };
  std::array<PerKind, kNumCollKinds> kinds;
  int64_t calls(CollKind kind) const { return kinds[size_t(kind)].calls; }
  int64_t bytes(CollKind kind) const { return kinds[size_t(kind)].bytes; }
  int64_t total_calls() const {
    int64_t n = 0;
    for (const PerKind& k : kinds) n += k.calls;
    return n;
  }
};

class CountingGroup final : public Decorator {
 public:
  explicit CountingGroup(Ref<ProcessGroup> inner)
      : CountingGroup(std::move(inner), std::make_shared<CollectiveCounts>()) {}
  CountingGroup(Ref<ProcessGroup> inner, std::shared_ptr<CollectiveCounts> counts)
      : Decorator(std::move(inner)), counts_(std::move(counts)) {}

  Ref<Work> submit(const Collective& c) override {
    CollectiveCounts::PerKind& k = counts_->kinds[size_t(c.kind)];
    ++k.calls;
    for (const Tensor& t : c.in.empty() ? c.out : c.in) k.bytes += int64_t(t.nbytes());
    return inner_->submit(c);
  }
  const CollectiveCounts& counts() const { return *counts_; }

 protected:
  Ref<ProcessGroup> decorate(Ref<ProcessGroup> group) override {
    return make_ref<CountingGroup>(std::move(group), counts_);
  }

 private:
  std::shared_ptr<CollectiveCounts> counts_;
};

}  // namespace tessera
