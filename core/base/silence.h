// A wait that takes long says what it waits for: after 10 s, or half of its deadline where that is
// sooner, then once a minute. This is the clock for it.
#pragma once
#include <algorithm>
#include <chrono>

namespace tessera {

class Silence {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kFirst{10}, kAgain{60};

  /// Begins with the wait, which ends after `deadline`.
  explicit Silence(Clock::duration deadline) : end_(begin_ + first(deadline)) {}

  /// How long a wait of this deadline is silent.
  static Clock::duration first(Clock::duration deadline) {
    return std::min<Clock::duration>(kFirst, deadline / 2);
  }
  /// When it will be time to say something.
  Clock::time_point end() const { return end_; }
  /// Whether it is time to say something; true once for each time.
  bool over() {
    if (Clock::now() < end_) return false;
    end_ = Clock::now() + kAgain;
    return true;
  }
  /// Seconds since the wait began.
  double waited() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  Clock::time_point begin_ = Clock::now(), end_;
};

}  // namespace tessera
