// Whether to stage a tensor through the caches or past them. Cores that share a last-level cache
// hand lines over in it, at up to 100 GB/s; where they do not (cores of two dies, many virtual
// machines), a line that is dirty in the other core's cache costs ten times one that is in memory:
// 2 against 7 GB/s measured between two cores. So each size of window tries both a few times and
// keeps the faster one. Invariant: results do not depend on the choice.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdint>

namespace tessera::detail {

class StageTuner {
 public:
  using Clock = std::chrono::steady_clock;

  /// The way to stage `bytes` this time. All ranks make the same sequence of trials.
  bool past_caches(int64_t bytes) {
    current_ = class_of(bytes);
    if (!current_) return false;
    if (current_->calls >= 2 * kTrials) return current_->best_us[1] < current_->best_us[0];
    start_ = Clock::now();
    return current_->calls & 1;
  }
  /// The window asked for last has been read.
  void done() {
    if (!current_ || current_->calls >= 2 * kTrials) return;
    double us = std::chrono::duration<double, std::micro>(Clock::now() - start_).count();
    double& best = current_->best_us[current_->calls++ & 1];
    best = std::min(best, us);
  }

 private:
  static constexpr int kTrials = 8, kFirst = 11, kLast = 20;  // sizes of 1 KiB to 512 KiB, a window
  struct Class {
    int calls = 0;
    double best_us[2] = {1e300, 1e300};
  };
  Class* class_of(int64_t bytes) {
    int width = std::bit_width(uint64_t(bytes));
    return width < kFirst ? nullptr : &classes_[size_t(std::min(width, kLast) - kFirst)];
  }
  std::array<Class, kLast - kFirst + 1> classes_;
  Class* current_ = nullptr;
  Clock::time_point start_;
};

}  // namespace tessera::detail
