// Measures how long the collectives of a wrapper were executing, for the report of a step.
// Internal: not part of the public interface.
#pragma once
#include <utility>
#include <vector>

#include "collectives/process_group.h"

namespace tessera::parallel {

class CommunicationTime {
 public:
  /// If a collective is still to fill `t`, it will be counted once it is done.
  void add(const Tensor& t) {
    if (!t.storage()) return;
    auto* work = dynamic_cast<Work*>(t.storage()->ready().get());
    if (!work) return;
    works_.emplace_back(work);
    on_device_ = !t.storage()->host_addressable();
  }
  /// Counts the collectives that are done.
  void count() { count(false); }
  /// Forgets collectives in progress without counting them.
  void forget() { works_.clear(); }
  /// Returns the time since the last call, waits for peers included. Waits for collectives in
  /// progress, but for those of a device, which count at a later call. Throws the error of one that
  /// failed.
  double take_ms() {
    count(!on_device_);
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
  bool on_device_ = false;
  double ms_ = 0;
};

}  // namespace tessera::parallel
