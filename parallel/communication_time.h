// How long the collectives of a wrapper were executing, for reports of a step.
#pragma once
#include <utility>
#include <vector>

#include "collectives/process_group.h"

namespace tessera::parallel {

class CommunicationTime {
 public:
  /// `t`, if a collective is still to fill it, is counted once that is done.
  void add(const Tensor& t) {
    if (!t.storage()) return;
    if (auto* work = dynamic_cast<Work*>(t.storage()->ready().get())) works_.emplace_back(work);
  }
  /// Counts what is done.
  void count() { count(false); }
  /// Nothing that is under way will be counted.
  void forget() { works_.clear(); }
  /// Since this was last asked, waiting for peers included. Waits for what is under way, and throws
  /// what that failed with.
  double take_ms() {
    count(true);
    return std::exchange(ms_, 0);
  }

 private:
  void count(bool wait) {
    std::erase_if(works_, [&](const Ref<Work>& w) {
      if (!wait && !w->done()) return false;
      w->wait();
      ms_ += w->elapsed_ms();
      return true;
    });
  }

  std::vector<Ref<Work>> works_;
  double ms_ = 0;
};

}  // namespace tessera::parallel
