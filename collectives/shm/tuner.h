// What is fastest for a size, found by trying. Cores that share a last-level cache hand lines over
// in it, at up to 100 GB/s; where they do not (cores of two dies, many virtual machines), a line
// that is dirty in the other core's cache costs ten times one that is in memory: 2 against 7 GB/s
// measured between two cores. So whether to write past the caches, and whether to reduce in place
// what peers can reach or to stage it, is tried a few times for each size, and the faster way kept.
// Invariant: results do not depend on the choice.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdint>

namespace tessera::detail {

/// How a window goes into a staging area; each rank decides for itself.
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

/// How an all_reduce is done whose tensors all ranks can reach.
enum class Way : uint8_t {
  kStaged,    // as if they could not
  kInPlace,   // each rank reduces a slice and writes it to all
  kStreamed,  // the same, past the caches
};

/// Ranks must agree on the way, so rank 0's times count: it publishes its verdict with each call,
/// and everybody goes by the one that came with the call before.
class PlaceTuner {
 public:
  /// The way for an all_reduce of `bytes`; equal on all ranks.
  Way way(int64_t bytes) const {
    const Class& c = classes_[class_of(bytes)];
    if (tries(bytes)) return way_of_trial(bytes, c.calls);
    return Way(adopted_ >> 2 * class_of(bytes) & 3);
  }
  bool tries(int64_t bytes) const {
    const Class& c = classes_[class_of(bytes)];
    return c.calls < (large(bytes) ? 2 * kTrialsOfLarge : kWays * kTrials);
  }
  /// A trial has taken `us` on this rank.
  void took(int64_t bytes, double us) {
    Class& c = classes_[class_of(bytes)];
    double& best = c.best_us[size_t(way_of_trial(bytes, c.calls++))];
    best = std::min(best, us);
  }
  /// The fastest way of each class, two bits each.
  uint64_t verdict() const {
    uint64_t all = 0;
    for (size_t k = 0; k < kClasses; ++k) {
      const auto& best = classes_[k].best_us;
      all |= uint64_t(std::min_element(best.begin(), best.end()) - best.begin()) << 2 * k;
    }
    return all;
  }
  void adopt(uint64_t verdict) { adopted_ = verdict; }

 private:
  static constexpr int kWays = 3, kTrials = 8, kTrialsOfLarge = 3;
  static constexpr size_t kClasses = 32;
  // Far beyond caches a copy into a staging area is never the faster way.
  static bool large(int64_t bytes) { return class_of(bytes) > 22; }  // from 4 MiB on
  static Way way_of_trial(int64_t bytes, int call) {
    return large(bytes) ? Way(1 + call % 2) : Way(call % kWays);
  }
  struct Class {
    int calls = 0;
    std::array<double, kWays> best_us{1e300, 1e300, 1e300};
  };
  static size_t class_of(int64_t bytes) {
    return std::min<size_t>(size_t(std::bit_width(uint64_t(bytes))), kClasses - 1);
  }
  std::array<Class, kClasses> classes_;
  uint64_t adopted_ = 0;
};

}  // namespace tessera::detail
