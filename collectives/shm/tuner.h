// Finds the fastest way to move data of a size by timing the candidates. Cores that share a
// last-level cache pass cache lines to each other at up to 100 GB/s. Where they do not (cores of
// two dies, many virtual machines), reading a line that is dirty in another core's cache costs ten
// times reading it from memory: 2 against 7 GB/s were measured between two cores. So the ways, with
// streaming stores or without, are timed a few times for each size, and the fastest is kept.
// Invariant: results do not depend on the choice.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdint>
#include <utility>

namespace tessera::detail {

/// Which of `ways` trial number `call` uses. The calls of a step that share trials (buckets,
/// windows) come in a fixed order and differ in size. So that no size is always tried with the same
/// way, each round of trials begins with the way given by the Thue-Morse sequence, which has no
/// period.
inline int tried(int call, int ways) {
  return (call + std::popcount(unsigned(call / ways))) % ways;
}

/// Chooses how a window is written to a staging area; each rank decides for itself.
class StageTuner {
 public:
  using Clock = std::chrono::steady_clock;

  /// Whether to stage `bytes` with streaming stores this time. All ranks make the same sequence of
  /// trials.
  bool past_caches(int64_t bytes) {
    current_ = class_of(bytes);
    if (!current_) return false;
    if (current_->calls >= 2 * kTrials) return current_->best_us[1] < current_->best_us[0];
    start_ = Clock::now();
    return tried(current_->calls, 2) == 1;
  }
  /// Says that the window asked about last has been read.
  void done() {
    Class* c = std::exchange(current_, nullptr);
    if (!c || c->calls >= 2 * kTrials) return;
    double us = std::chrono::duration<double, std::micro>(Clock::now() - start_).count();
    double& best = c->best_us[tried(c->calls++, 2)];
    best = std::min(best, us);
  }

 private:
  // There are classes of window sizes from 1 KiB to 512 KiB.
  static constexpr int kTrials = 8, kFirst = 11, kLast = 20;
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

/// How an all_reduce is done when all ranks can reach its tensors.
enum class Way : uint8_t {
  kInPlace,   // each rank reduces a slice and writes it to all
  kStreamed,  // the same with streaming stores
  kStaged,    // as if the tensors could not be reached
};

/// Chooses the way of an all_reduce. Ranks must agree, so rank 0's times decide: it publishes its
/// verdict with each call, and all ranks follow the one that came with the call before.
class PlaceTuner {
 public:
  /// The way for an all_reduce of `bytes`. All ranks get the same.
  Way way(int64_t bytes) const {
    if (bytes < kFirstBytes) return Way::kInPlace;
    size_t k = class_of(bytes);
    return tries(bytes) ? Way(tried(classes_[k].calls, ways(bytes)))
                        : Way(adopted_ >> kBits * k & kMask);
  }
  bool tries(int64_t bytes) const {
    int trials = bytes < kLargeBytes ? kTrials : kTrialsOfLarge;
    return bytes >= kFirstBytes && classes_[class_of(bytes)].calls < trials * ways(bytes);
  }
  /// Records that a trial took `us` on this rank.
  void took(int64_t bytes, double us) {
    size_t k = class_of(bytes);
    Class& c = classes_[k];
    double& best = c.best_us[tried(c.calls++, ways(bytes))];
    best = std::min(best, us);
    auto fastest = uint32_t(std::ranges::min_element(c.best_us) - c.best_us);
    verdict_ = (verdict_ & ~(kMask << kBits * k)) | fastest << kBits * k;
  }
  /// The fastest way for each class of sizes.
  uint32_t verdict() const { return verdict_; }
  void adopt(uint32_t verdict) { adopted_ = verdict; }

 private:
  // Below kFirstBytes, in place was always fastest. From kNeverStagedBytes on, staging would go
  // through memory twice. Both are the least size of a class. Large calls are rare, so they are
  // tried less often.
  static constexpr int64_t kFirstBytes = 32 << 10, kNeverStagedBytes = 1 << 20,
                           kLargeBytes = 4 << 20;
  static constexpr int kTrials = 8, kTrialsOfLarge = 3;  // trials of each way
  static constexpr size_t kBits = 2, kClasses = 32 / kBits;
  static constexpr uint32_t kMask = (1u << kBits) - 1;
  struct Class {
    int calls = 0;
    double best_us[3] = {1e300, 1e300, 1e300};  // by way
  };
  static int ways(int64_t bytes) { return bytes < kNeverStagedBytes ? 3 : 2; }
  static size_t class_of(int64_t bytes) {
    return std::min<size_t>(size_t(std::bit_width(uint64_t(bytes / kFirstBytes))), kClasses) - 1;
  }
  std::array<Class, kClasses> classes_;
  uint32_t verdict_ = 0, adopted_ = 0;
};

}  // namespace tessera::detail
